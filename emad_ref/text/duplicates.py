"""Near-duplicate documents: text that is counted as independent must not be the same text again.

Two documents are near-duplicates where at least 0.4 of the shingles that either has are in both: the Jaccard index of
their sets of five consecutive pieces of words, lower-cased, without spaces and punctuation. A copy with another header,
another date or every twelfth word changed is one; two documents of one kind are not (of 400 documents of
``world:premise`` or ``world:mixed`` no two share a quarter). The index is estimated from a bottom-k sketch, the
smallest hashes of a document, and is exact for short ones (Broder 1997, *On the resemblance and containment of
documents*).

A library for this (datasketch) brings a MinHash of random permutations and an index server; the sketch below needs one
hash and a dictionary.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from emad_ref.record import Ints

ALIKE = 0.4  # share of the shingles of two documents from which they count as one
SHINGLE = 5  # pieces
READ = 4_000  # pieces of a document that are looked at: more than the windows of it that are judged
KEPT = 256  # smallest hashes of a document: the index is known to 0.03 near the threshold
# of them, by which likely duplicates are found: two texts that are alike share fewer than two once in 300 times
LOOKED_UP = 16
# Many documents begin alike (a licence, a letterhead) and go on differently. A hash that COMMON of them have says
# little: it is looked up only for a document with fewer than RARE others. No hash leads to more than MOST documents,
# and no document is compared with more than COMPARED, those that share most with it: time grows with their number.
COMMON, RARE, MOST, COMPARED = 64, 6, 1_024, 8
ENDLESS = 10_000  # near-duplicates in a row, after which a source says nothing new any more

_PIECE = re.compile(r"\w{1,6}")  # long runs are cut: not every script puts spaces between words
_FACTORS = np.array([0x9E3779B97F4A7C15 * (2 * k + 1) % 2**64 for k in range(SHINGLE)], dtype=np.uint64)


def sketch(text: str) -> NDArray[np.uint64]:
    """[at most ``KEPT``] the smallest hashes of the text's shingles, ascending; of few pieces one hash of them all."""
    pieces = islice(_PIECE.finditer(text), READ)
    codes = np.array([zlib.crc32(piece.group().lower().encode()) for piece in pieces], dtype=np.uint64)
    if len(codes) < SHINGLE:  # too short for a shingle, or no word at all: only the same again is alike
        words = text.strip().lower() if not len(codes) else " ".join(map(str, codes.tolist()))
        return np.array([zlib.crc32(words.encode())], dtype=np.uint64)
    mixed = np.lib.stride_tricks.sliding_window_view(codes, SHINGLE) * _FACTORS
    hashes = np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(29)), axis=1) * _FACTORS[1]
    return np.unique(hashes ^ (hashes >> np.uint64(32)))[:KEPT]


def resemblance(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    """Estimated Jaccard index of two sketches, 0–1."""
    union = np.union1d(a, b)[: max(len(a), len(b))]
    return float(np.isin(np.intersect1d(a, b, assume_unique=True), union, assume_unique=True).sum() / len(union))


class Seen:
    """Documents read so far, each under the number of the first that it is a near-duplicate of."""

    def __init__(self) -> None:
        self._sketches: list[NDArray[np.uint64]] = []
        self._holders: dict[int, list[int]] = {}

    def place(self, text: str) -> tuple[int, bool]:
        """(number of the first document like this one among those that differ, whether this is that first)."""
        mine = sketch(text)
        lookup, holders = mine[:LOOKED_UP].tolist(), self._holders
        rare = [code for code in lookup if len(holders.get(code, ())) < COMMON]
        lookup = rare if len(rare) >= RARE else lookup
        shared = Counter(number for code in lookup for number in holders.get(code, ()))
        enough = 2 if len(mine) >= LOOKED_UP else 1
        likely = [number for number, codes in shared.most_common(COMPARED) if codes >= enough]
        for number in sorted(likely):
            if resemblance(mine, self._sketches[number]) >= ALIKE:
                return number, False
        number = len(self._sketches)
        self._sketches.append(mine)
        for code in lookup:
            known = holders.setdefault(code, [])
            if len(known) < MOST:
                known.append(number)
        return number, True


class Distinct(Iterator[str]):
    """The first of all documents that are alike, in order; ``left_out`` counts the others that were read so far.

    A source that gives nothing new ``ENDLESS`` times in a row ends.
    """

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents, self._seen, self.left_out = iter(documents), Seen(), 0

    def __next__(self) -> str:
        for text in islice(self._documents, ENDLESS):
            if self._seen.place(text)[1]:
                return text
            self.left_out += 1
        raise StopIteration


def clusters(texts: Iterable[str]) -> Ints:
    """int64 [texts] the same number for texts that are alike.

    >>> clusters(["one two three", "one, two  THREE!", "four"]).tolist()
    [0, 0, 1]
    """
    seen = Seen()
    return np.array([seen.place(text)[0] for text in texts], dtype=np.int64)
