"""Corpora by name: documents from the world, files or the hub, without near-duplicates, tokenised as far as needed.

``world:premise``, ``world:mixed``   generated (``text.world``)
``wikitext``                         ``wikitext-2/`` of a data folder, else the hub's WikiText-2 (raw)
``pile``                             ``pile/`` of a data folder, else the hub's Pile validation documents
``gsm8k``                            ``gsm8k/`` of a data folder, else the hub's GSM8K: a question and its worked answer
PATH                                 a .txt file (articles if it has WikiText headings, else paragraphs), a .jsonl file
                                     (field ``text``), or a folder with valid.txt and test.txt

Splits never overlap: if a source has a test part, ``evaluate`` reads it and the other splits share the rest. Shared
parts are dealt in runs of consecutive documents, because neighbours may have one subject. If documents are paragraphs,
the one at each border belongs to no split.

A field of a .jsonl file may name the group of each document (its author, its template). Groups are then dealt whole, in
the order in which the file first names them, and a split has its documents group by group. A group that the test file
of a folder shares with the other file belongs to the other splits alone.

Near-duplicates are documents whose sets of five consecutive word pieces have a Jaccard index of at least 0.4, estimated
from a bottom-k sketch (Broder 1997, *On the resemblance and containment of documents*). Only the first is kept, over
all splits in the order calibrate, validate, evaluate: documents that count as independent must not repeat the same
text, and a text that thresholds were chosen on must not judge them.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument, EmadError, MissingExtra, require_extra
from emad_ref.extensions import EXTENSIONS
from emad_ref.files import describe_file_kind, is_file, is_folder, parse_json, read_lines
from emad_ref.record import Ints
from emad_ref.text import world
from emad_ref.text.documents import SPLITS, Documents, Split, normalize_newlines_and_bom

# ---------------------------------------------------------------- the hub

HUB_TIMEOUT_S = 5.0  # seconds


def is_hub_reachable() -> bool:
    """Whether the hub answers, tested once per process; False in offline mode (``HF_HUB_OFFLINE``)."""
    from huggingface_hub import constants  # not at import, so that this package stays torch-free and quick

    return not constants.HF_HUB_OFFLINE and _hub_answers(constants.ENDPOINT)


@functools.cache
def _hub_answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=HUB_TIMEOUT_S)
    except Exception:  # any error of the client's HTTP library means no answer
        return False
    return True


@contextmanager
def force_hub_offline() -> Iterator[None]:
    """Make ``huggingface_hub`` and ``datasets`` behave as under ``HF_HUB_OFFLINE=1`` inside the block.

    They read that variable once, at import, so the block sets and restores their own flags.
    """
    import datasets.config
    from huggingface_hub import constants

    with ExitStack() as stack:
        for module in (constants, datasets.config):
            stack.enter_context(patch.object(module, "HF_HUB_OFFLINE", True))
        yield


# ---------------------------------------------------------------- near-duplicates

DUPLICATE_SIMILARITY = 0.4  # least share of common shingles of two documents that count as one
SHINGLE = 5  # pieces
MAX_PIECES = 4_000  # compared pieces of a document, more than its judged windows have
SKETCH_SIZE = 256  # smallest hashes of a document: the index is precise to 0.03 near the threshold
# hashes for finding likely duplicates; two similar texts share fewer than two once in 300 times
LOOKUP_HASHES = 16
# Many documents have equal beginnings (a licence, a letterhead) and different continuations. A hash of COMMON_HOLDERS
# documents is uninformative: only a document with fewer than MIN_RARE_HASHES others uses it. No hash leads to more than
# MAX_HOLDERS documents, and no document is compared with more than MAX_COMPARISONS, so time is linear in their number.
COMMON_HOLDERS, MIN_RARE_HASHES, MAX_HOLDERS, MAX_COMPARISONS = 64, 6, 1_024, 8
MAX_DUPLICATES_IN_A_ROW = 10_000  # consecutive near-duplicates that end a source

_PIECE = re.compile(r"\w{1,6}")  # long runs are cut: not every script puts spaces between words
_FACTORS = np.array([0x9E3779B97F4A7C15 * (2 * k + 1) % 2**64 for k in range(SHINGLE)], dtype=np.uint64)


def bottom_k_sketch(text: str) -> NDArray[np.uint64]:
    """[at most ``SKETCH_SIZE``] the smallest hashes of the shingles, ascending; for few pieces one hash of all."""
    pieces = islice(_PIECE.finditer(text), MAX_PIECES)
    codes = np.array([zlib.crc32(piece.group().lower().encode()) for piece in pieces], dtype=np.uint64)
    if len(codes) < SHINGLE:  # too short for a shingle, or without words: only an equal text is similar
        words = text.strip().lower() if not len(codes) else " ".join(map(str, codes.tolist()))
        return np.array([zlib.crc32(words.encode())], dtype=np.uint64)
    mixed = np.lib.stride_tricks.sliding_window_view(codes, SHINGLE) * _FACTORS
    hashes = np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(29)), axis=1) * _FACTORS[1]
    return np.unique(hashes ^ (hashes >> np.uint64(32)))[:SKETCH_SIZE]


def jaccard_index(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    """Estimated Jaccard index of two sketches, 0–1."""
    union = np.union1d(a, b)[: max(len(a), len(b))]
    return float(np.isin(np.intersect1d(a, b, assume_unique=True), union, assume_unique=True).sum() / len(union))


class DocumentIndex:
    """Index of documents: each is filed under the first document that it nearly duplicates."""

    def __init__(self) -> None:
        self._sketches: list[NDArray[np.uint64]] = []
        self._holders: dict[int, list[int]] = {}

    def assign_cluster_and_novelty(self, text: str) -> tuple[int, bool]:
        """(number of the first similar document among the distinct ones, whether this document is that first)."""
        mine = bottom_k_sketch(text)
        found = self.find(mine)
        return (self.add(mine), True) if found is None else (found, False)

    def find(self, sketch: NDArray[np.uint64]) -> int | None:
        """Number of the first document that is similar to the one with this sketch; None without one."""
        shared = Counter(number for code in self._lookup_hashes(sketch) for number in self._holders.get(code, ()))
        enough = 2 if len(sketch) >= LOOKUP_HASHES else 1
        likely = sorted(number for number, codes in shared.most_common(MAX_COMPARISONS) if codes >= enough)
        similar = (each for each in likely if jaccard_index(sketch, self._sketches[each]) >= DUPLICATE_SIMILARITY)
        return next(similar, None)

    def add(self, sketch: NDArray[np.uint64]) -> int:
        """File a document that is similar to none; returns its number."""
        number = len(self._sketches)
        lookup = self._lookup_hashes(sketch)
        self._sketches.append(sketch)
        for code in lookup:
            earlier = self._holders.setdefault(code, [])
            if len(earlier) < MAX_HOLDERS:
                earlier.append(number)
        return number

    def _lookup_hashes(self, sketch: NDArray[np.uint64]) -> list[int]:
        lookup: list[int] = sketch[:LOOKUP_HASHES].tolist()
        rare = [code for code in lookup if len(self._holders.get(code, ())) < COMMON_HOLDERS]
        return rare if len(rare) >= MIN_RARE_HASHES else lookup


class DistinctDocumentIterator(Iterator[str]):
    """Documents without near-duplicates of earlier ones, in order; ``left_out`` counts the dropped ones so far.

    ``documents`` come with the number of their group, which ``groups`` lists for the documents given so far.
    ``index_earlier`` makes an index of documents that must not be repeated either; it is called before the first
    document is read. A source that repeats itself ``MAX_DUPLICATES_IN_A_ROW`` times ends.
    """

    def __init__(
        self, documents: Iterable[tuple[str, int]], index_earlier: Callable[[], DocumentIndex] = DocumentIndex
    ) -> None:
        self._documents, self._index_earlier = iter(documents), functools.cache(index_earlier)
        self._seen, self.left_out, self.groups = DocumentIndex(), 0, list[int]()

    def __next__(self) -> str:
        for text, group in islice(self._documents, MAX_DUPLICATES_IN_A_ROW):
            sketch = bottom_k_sketch(text)
            if self._index_earlier().find(sketch) is None and self._seen.find(sketch) is None:
                self._seen.add(sketch)
                self.groups.append(group)
                return text
            self.left_out += 1
        raise StopIteration


def cluster_near_duplicates(texts: Iterable[str]) -> Ints:
    """int64 [texts] cluster numbers, equal for similar texts.

    >>> cluster_near_duplicates(["one two three", "one, two  THREE!", "four"]).tolist()
    [0, 0, 1]
    """
    index = DocumentIndex()
    return np.array([index.assign_cluster_and_novelty(text)[0] for text in texts], dtype=np.int64)


# ---------------------------------------------------------------- corpora

TEXT = ("text",)


@dataclass(frozen=True)
class PublishedCorpus:
    """A data set in a folder of a data folder, or in a repository of the hub.

    ``configuration`` of the hub; ``shared``, its part beside one named test, None if it has no test part. ``stem``: the
    name of the file next to test.* in ``folder``. ``fields``: those of a row that make a document.
    """

    folder: str
    repository: str
    configuration: str | None = None
    shared: str | None = None
    stem: str = "valid"
    fields: tuple[str, ...] = TEXT


PUBLISHED = {
    "wikitext": PublishedCorpus("wikitext-2", "Salesforce/wikitext", "wikitext-2-raw-v1", "validation"),
    "pile": PublishedCorpus("pile", "NeelNanda/pile-10k"),
    "gsm8k": PublishedCorpus("gsm8k", "openai/gsm8k", "main", "train", "train", ("question", "answer")),
}
Quarters = tuple[int, int]  # range of a source's documents, in quarters: first, and end
DEALT: tuple[Split, ...] = ("calibrate", "validate", "evaluate")  # the first that holds a text keeps it
WHOLE: dict[Split, Quarters] = {"calibrate": (0, 1), "validate": (1, 2), "evaluate": (2, 4)}
WITHOUT_TEST: dict[Split, Quarters] = {"calibrate": (0, 2), "validate": (2, 4)}  # shares of the rest beside a test part
BLOCK = 25  # consecutive documents of a stream of unknown length that stay in one split
COMPARED = 20_000  # documents of each earlier split that a split does not repeat; runs read fewer


log = logging.getLogger(__name__)


class CorpusUnavailable(EmadError):
    """Raised for a corpus that neither the data folder nor the hub provides."""


def iterate_corpus_documents(
    corpus: str, split: Split, *, seed: int = 0, data: Path | None = None, corpus_group: str | None = None
) -> Documents:
    """Documents of a corpus and split (the world's are endless).

    Those of files, data sets and extensions come as ``DistinctDocumentIterator``: only the first of near-duplicates,
    over all splits. The world's are drawn independently, and unfiltered. ``corpus_group``: the field of a .jsonl file
    that names the group of each document; None: each document is its own group.

    Raises:
        BadArgument: neither a known corpus nor a readable file or folder, an unknown split, or no documents for it;
            groups of a corpus without fields, a line without its group.
        CorpusUnavailable: a known corpus that cannot be reached.
    """
    require_corpus_with_fields(corpus, corpus_group)
    if corpus in world.CORPORA:
        return world.generate_documents(corpus, split, seed)
    documents = _numbered_documents(corpus, split, seed, data, corpus_group)
    stamps = tuple(each.stat().st_mtime_ns for each in (Path(corpus), data) if each is not None and each.exists())
    index_earlier = partial(_index_earlier_splits, corpus, split, seed, data, corpus_group, stamps)
    return DistinctDocumentIterator(documents, index_earlier)


@functools.lru_cache(maxsize=4)  # a run reads a split several times
def _index_earlier_splits(
    corpus: str, split: Split, seed: int, data: Path | None, corpus_group: str | None, stamps: tuple[int, ...]
) -> DocumentIndex:
    """Index of the documents of the splits before ``split``. ``stamps``: times of change of what they are read from."""
    index = DocumentIndex()
    for earlier in DEALT[: DEALT.index(split)]:
        try:
            documents = _numbered_documents(corpus, earlier, seed, data, corpus_group)
        except (BadArgument, CorpusUnavailable):  # this run cannot read it, so nothing was chosen on it
            continue
        for text, _ in islice(documents, COMPARED):
            index.assign_cluster_and_novelty(text)
    return index


def _numbered_documents(
    corpus: str, split: Split, seed: int, data: Path | None, corpus_group: str | None
) -> Iterator[tuple[str, int]]:
    """Documents with the number of their group; without groups, with their own number."""
    if corpus_group is None:
        return zip(_raw_documents(corpus, split, seed, data), count())
    require_measuring_split(split)
    return iterate_documents_by_group(Path(corpus), split, corpus_group)


def require_measuring_split(split: Split) -> None:
    """Raise BadArgument unless ``split`` is one that files and data sets have."""
    if split not in SPLITS:
        raise BadArgument("split", split, f"one of {', '.join(SPLITS)}")
    if split == "train":
        raise BadArgument("split", split, "calibrate, validate or evaluate", "only the world has text to train on")


def _raw_documents(corpus: str, split: Split, seed: int, data: Path | None) -> Documents:
    require_measuring_split(split)
    if corpus in PUBLISHED:
        published = PUBLISHED[corpus]
        folder = data / published.folder if data else None
        if folder is not None and folder.is_dir():
            return iterate_folder_split_documents(folder, split, published.stem, published.fields)
        if published.shared is not None:
            if split == "evaluate":
                return stream_hub_documents(corpus, "test")
            shared = list(stream_hub_documents(corpus, published.shared))
            return iter(shared[slice(*split_document_range(len(shared), WITHOUT_TEST[split]))])
        return iterate_split_documents(stream_hub_documents(corpus, "train"), split)
    if corpus in EXTENSIONS.places("corpora"):
        mine: Documents = EXTENSIONS.load_part("corpora", corpus)(split, seed, data)
        return (
            normalize_newlines_and_bom(text, f"{corpus}, {split}, document {number}")
            for number, text in enumerate(mine, start=1)
        )
    path = Path(corpus)
    if corpus.strip() and is_folder(path):  # a blank name would be the current folder
        return iterate_folder_split_documents(path, split)
    if is_file(path):
        return iterate_documents_of_given_quarters(path, WHOLE[split])
    if os.path.exists(corpus):
        kind = describe_file_kind(path.stat().st_mode)
        raise BadArgument("corpus", corpus, "a file or a folder", f"it is {kind}, which can be read once only: save it")
    names = ", ".join([*world.CORPORA, *PUBLISHED, "self", *EXTENSIONS.places("corpora")])
    raise BadArgument("corpus", corpus, f"one of {names}, or a path that exists", "check the spelling of the path")


def iterate_split_documents(documents: Iterable[str], split: Split) -> Iterator[str]:
    """The documents of a stream of whole texts that belong to ``split``: every fourth block, or two of four."""
    first, end = WHOLE[split]
    return (text for number, text in enumerate(documents) if first <= number // BLOCK % 4 < end)


def split_document_range(total: int, quarters: Quarters) -> tuple[int, int]:
    """Range (first, end) of the documents in ``quarters`` of ``total``.

    >>> [split_document_range(10, quarters) for quarters in WHOLE.values()]
    [(0, 3), (3, 5), (5, 10)]
    """
    first, end = (math.ceil(total * quarter / 4) for quarter in quarters)
    return first, end


def iterate_documents_of_given_quarters(path: Path, quarters: Quarters, fields: Sequence[str] = TEXT) -> Iterator[str]:
    """The documents in ``quarters`` of a file, which is read twice, first to count them: it may not fit into memory."""
    first, end = split_document_range(sum(1 for _ in iterate_file_documents(path, fields)), quarters)
    neighbours = first > 0 and path.suffix == ".txt" and not has_wikitext_headings(path)
    return islice(iterate_file_documents(path, fields), first + neighbours, end)


def iterate_folder_split_documents(
    folder: Path, split: Split, stem: str = "valid", fields: Sequence[str] = TEXT
) -> Iterator[str]:
    """``evaluate`` from test.*, the other splits from halves of ``stem``.*; a folder without those names is refused."""
    chosen = find_split_file(folder, split, stem)
    return (
        iterate_file_documents(chosen, fields)
        if split == "evaluate"
        else iterate_documents_of_given_quarters(chosen, WITHOUT_TEST[split], fields)
    )


def find_split_file(folder: Path, split: Split, stem: str = "valid") -> Path:
    """The file of ``folder`` that holds ``split``; raises BadArgument without one."""
    stem = "test" if split == "evaluate" else stem
    try:
        files = sorted(path for path in folder.iterdir() if path.stem == stem and path.suffix in READERS)
    except OSError as error:
        raise BadArgument("corpus", str(folder), "a folder that can be read", str(error.strerror)) from error
    if not files:
        raise BadArgument(
            "corpus", str(folder), f"a folder that holds {stem}.txt or {stem}.jsonl", "name a single file instead"
        )
    return files[0]


def iterate_file_documents(path: Path, fields: Sequence[str] = TEXT) -> Iterator[str]:
    """Non-empty documents of a .txt or .jsonl file; those of a .jsonl file are made of ``fields``."""
    if path.suffix not in READERS:
        raise BadArgument("corpus", str(path), f"a file ending in {' or '.join(READERS)}", "convert it first")
    return (text for text in READERS[path.suffix](path, fields) if text.strip())


def iterate_text_documents(path: Path) -> Iterator[str]:
    """Articles of a WikiText file (split at top-level headings), paragraphs of any other text."""
    starts = is_heading if has_wikitext_headings(path) else lambda line: not line.strip()
    return _join_lines(iterate_newline_normalized_lines(path), starts)


def _join_lines(lines: Iterable[str], starts: Callable[[str], bool]) -> Iterator[str]:
    """Join ``lines`` into documents, each of which begins at a line for which ``starts`` is true."""
    document: list[str] = []
    for line in lines:
        if starts(line) and document:
            yield "".join(document)
            document = []
        document.append(line)
    yield "".join(document)


def has_wikitext_headings(path: Path) -> bool:
    """Whether a text file marks its articles by WikiText headings."""
    return any(is_heading(line) for line in iterate_newline_normalized_lines(path))


def iterate_newline_normalized_lines(path: Path) -> Iterator[str]:
    """Lines of a text file, each ending with \n, whatever its line ends.

    Raises:
        BadArgument: a line that is no text, by its number.
    """
    for number, line in enumerate(read_lines(path, "corpus"), start=1):
        text = normalize_newlines_and_bom(line, f"{path.name}, line {number}")
        yield from io.StringIO(text)  # several, if a carriage return alone ended them


def is_heading(line: str) -> bool:
    """A top-level WikiText heading: `` = Title = ``, not `` = = Section = = ``."""
    words = line.split()
    return len(words) > 2 and words[0] == words[-1] == "=" and words[1] != "=" and words[-2] != "="


def iterate_jsonl_documents(path: Path, fields: Sequence[str] = TEXT) -> Iterator[str]:
    """The text of every line's ``fields``; blank lines are skipped."""
    return (text for text, _, _ in _iterate_jsonl_rows(path, fields))


def _iterate_jsonl_rows(path: Path, fields: Sequence[str] = TEXT) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """(text, all fields, file and line) of every line."""
    for number, line in enumerate(read_lines(path, "corpus"), start=1):
        if line.strip():
            place = f"{path.name}, line {number}"
            why = ""
            try:
                row = parse_json(line)
            except ValueError as error:
                row, why = None, f" ({error})"
            text = format_row_text(row, fields)
            if text is None:
                names = " and ".join(f'"{field}"' for field in fields)
                hold = f"field {names} is a string" if len(fields) == 1 else f"fields {names} are strings"
                raise BadArgument(place, line[:60], f"a JSON object whose {hold}", f"mend the line{why}")
            yield normalize_newlines_and_bom(text, place), row, place


def format_row_text(row: Any, fields: Sequence[str]) -> str | None:
    """One field unchanged, or a line per field with its name; None unless each is a string."""
    if not isinstance(row, Mapping) or not all(isinstance(row.get(field), str) for field in fields):
        return None
    if len(fields) == 1:
        return str(row[fields[0]])
    return "".join(f"{field.capitalize()}: {row[field]}\n" for field in fields)


READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[str]]] = {
    ".txt": lambda path, fields: iterate_text_documents(path),
    ".jsonl": iterate_jsonl_documents,
}


# ---------------------------------------------------------------- groups of documents


def require_corpus_with_fields(corpus: str, corpus_group: str | None) -> None:
    """Raise BadArgument if documents are to be grouped by a field, and ``corpus`` is no file or folder."""
    if corpus_group is not None and not os.path.exists(corpus):
        remedy = f"{corpus} has no fields: name a file as the corpus, or leave the group out"
        raise BadArgument("corpus_group", corpus_group, "a corpus that is a .jsonl file, or a folder of them", remedy)


def iterate_grouped_lines(path: Path, corpus_group: str) -> Iterator[tuple[str, str]]:
    """(text, group) of every line of a .jsonl file.

    Raises:
        BadArgument: another kind of file; a line without text, or whose ``corpus_group`` is no text.
    """
    if path.suffix != ".jsonl":
        raise BadArgument("corpus_group", corpus_group, "lines of JSON, which have fields", f"{path.name} has none")
    for text, row, place in _iterate_jsonl_rows(path):
        group = row.get(corpus_group)
        if not isinstance(group, str) or not group.strip():
            known = f"it has {', '.join(map(repr, row))}" if corpus_group not in row else "mend the line"
            raise BadArgument(f"{place}: {corpus_group}", group, "a string that names the document's group", known)
        if text.strip():
            yield text, group


@dataclass(frozen=True)
class GroupDeal:
    """The groups of a split: in file ``path``, in order, each with its documents. ``shared`` ones are left out."""

    path: Path
    documents: Mapping[str, int]
    shared: int = 0


def deal_groups(path: Path, split: Split, corpus_group: str) -> GroupDeal:
    """Deal whole groups as ``iterate_corpus_documents`` deals documents; no group falls into two splits."""
    chosen, quarters, elsewhere = path, WHOLE[split], set[str]()
    if is_folder(path):
        chosen, quarters = find_split_file(path, split), WITHOUT_TEST.get(split, (0, 4))
        if split == "evaluate":
            elsewhere = {group for _, group in iterate_grouped_lines(find_split_file(path, "validate"), corpus_group)}
    every = Counter(group for _, group in iterate_grouped_lines(chosen, corpus_group))  # in the order of the file
    own = [group for group in every if group not in elsewhere]
    first, end = split_document_range(len(own), quarters)
    return GroupDeal(chosen, {group: every[group] for group in own[first:end]}, len(every) - len(own))


def iterate_documents_by_group(path: Path, split: Split, corpus_group: str) -> Iterator[tuple[str, int]]:
    """Documents of a split, group by group, with the number of their group, from 0. The split is held in memory."""
    dealt = deal_groups(path, split, corpus_group)
    texts: dict[str, list[str]] = {group: [] for group in dealt.documents}
    for text, group in iterate_grouped_lines(dealt.path, corpus_group):
        if group in texts:
            texts[group].append(text)
    return ((text, number) for number, each in enumerate(texts.values()) for text in each)


def group_of_document(texts: Documents, place: int) -> int:
    """The group of the document that was given as number ``place``."""
    return texts.groups[place] if isinstance(texts, DistinctDocumentIterator) else place


def describe_dealt_documents(corpus: str, enough: int) -> str:
    """How the documents of a file are dealt, near-duplicates counted, and how many give ``enough`` to judge on.

    "" for a corpus that is no file.

    Raises:
        BadArgument: as ``iterate_corpus_documents``.
    """
    path, named = Path(corpus), {*world.CORPORA, *PUBLISHED, *EXTENSIONS.places("corpora")}
    if corpus in named or not is_file(path):
        return ""
    total = sum(1 for _ in iterate_file_documents(path))
    ranges = (split_document_range(total, WHOLE[split]) for split in DEALT)
    calibrate, choose, judge = (end - first for first, end in ranges)
    few = f"; claims about text survive from {enough} judged on: {2 * enough} documents" if judge < enough else ""
    return f"{corpus}, {total:,} documents: {calibrate:,} calibrate, {choose:,} choose, {judge:,} judge{few}"


def describe_dealt_groups(corpus: str, corpus_group: str) -> str:
    """How a grouped corpus is dealt: documents and groups of each split, near-duplicates counted.

    Raises:
        BadArgument: as ``iterate_corpus_documents``.
    """
    require_corpus_with_fields(corpus, corpus_group)
    dealt = {split: deal_groups(Path(corpus), split, corpus_group) for split in DEALT}
    parts = [f"{split} {sum(deal.documents.values())} ({len(deal.documents)})" for split, deal in dealt.items()]
    shared = sum(deal.shared for deal in dealt.values())
    left_out = f"; groups of the test file that the other file has, too, and that are left out: {shared}"
    return f"{corpus} by {corpus_group}, documents (groups): {', '.join(parts)}{left_out if shared else ''}"


def stream_hub_documents(corpus: str, part: str) -> Iterator[str]:
    """Stream the documents of a part (train, validation, test) of a hub data set.

    Raises:
        CorpusUnavailable: the hub, its cache and the package ``datasets`` do not provide it.
    """
    published = PUBLISHED[corpus]
    name, fields = published.repository, published.fields
    try:
        require_extra(
            f"corpus={corpus!r}", "datasets", alternative=f"put its files under {published.folder}/ in a data folder"
        )
        from datasets import load_dataset

        streaming = is_hub_reachable()  # an earlier download in the cache is no stream
        with nullcontext() if streaming else force_hub_offline():
            rows = load_dataset(name, published.configuration, split=part, streaming=streaming)
        first = next(iter(rows))
    except MissingExtra as error:
        raise CorpusUnavailable(str(error)) from error
    except Exception as error:  # the hub client raises dozens of types; all mean the same to the caller
        raise CorpusUnavailable(
            f"corpus={corpus!r}, but {name} is out of reach ({type(error).__name__}: {error}); "
            f"put its files under {published.folder}/ in a data folder and name that, "
            "or choose another corpus"
        ) from error
    if not set(fields) <= set(first):
        raise CorpusUnavailable(
            f"corpus={corpus!r}: {name} has fields {sorted(first)}, but expected {', '.join(map(repr, fields))}; "
            "choose another corpus"
        )

    def text_of(number: int, row: Any) -> str:
        text = format_row_text(row, fields)
        if text is None:
            raise CorpusUnavailable(
                f"corpus={corpus!r}: {name}, {part}, row {number} has no text as {', '.join(map(repr, fields))}; "
                "choose another corpus"
            )
        return text

    texts = (text_of(number, row) for number, row in enumerate(rows, start=1))
    lines = (normalize_newlines_and_bom(text, name) for text in texts if _is_clean(text, name))
    return (text for text in (join_lines_into_articles(lines) if corpus == "wikitext" else lines) if text.strip())


def _is_clean(text: str, name: str) -> bool:
    """Whether a document of the hub is text; one with NUL cannot be mended there and is dropped, by name."""
    if "\0" in text:
        log.warning("%s: a document holds NUL, which is no text, and is left out: %.60r", name, text)
    return "\0" not in text


def join_lines_into_articles(lines: Iterable[str]) -> Iterator[str]:
    """Lines of the hub's WikiText, joined into articles."""
    return _join_lines(lines, is_heading)


# ---------------------------------------------------------------- tokens

LONG_CHARACTERS = 100_000  # characters; shorter documents are tokenised whole
MARGIN_TOKENS = 64  # tokens before a cut that are discarded
SECOND_CUT_CHARACTERS = 1009  # characters, a prime: the difference between the two starts


def tokenize_without_special_tokens(tokenizer: Any, text: str) -> Ints | LazyDocumentTokens:
    """Tokens of ``text`` without special ones, int64 [n]; for a long text, an object that returns any slice."""
    return _encode(tokenizer, text) if len(text) <= LONG_CHARACTERS else LazyDocumentTokens(tokenizer, text)


class LazyDocumentTokens:
    """Tokens of a long text. ``document[start:stop]`` equals the slice of all its tokens."""

    def __init__(self, tokenizer: Any, text: str):
        self._tokenizer, self._text = tokenizer, text
        self._known, self._read = np.zeros(0, dtype=np.int64), 0  # tokens, and the characters tokenised so far

    def __getitem__(self, part: slice) -> Ints:
        """int64; steps of one, from the front."""
        if part.stop is None:
            self._read_on(len(self._text))
        while part.stop is not None and len(self._known) < part.stop and self._read < len(self._text):
            self._read_on(max(LONG_CHARACTERS, 2 * self._read))
        return self._known[part]

    def _read_on(self, characters: int) -> None:
        """Tokenise the first ``characters``, or all if the rest is short or tokens depend on the cut."""
        if characters + SECOND_CUT_CHARACTERS < len(self._text) // 2:
            first, second = (
                _encode(self._tokenizer, self._text[:end]) for end in (characters, characters + SECOND_CUT_CHARACTERS)
            )
            sure = min(len(first), len(second)) - MARGIN_TOKENS
            if sure > 0 and np.array_equal(first[:sure], second[:sure]):
                self._known, self._read = first[:sure], characters
                return
        self._known, self._read = _encode(self._tokenizer, self._text), len(self._text)


def _encode(tokenizer: Any, text: str) -> Ints:
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
