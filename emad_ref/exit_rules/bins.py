"""Which row of thresholds a token belongs to: one or two coarse features of it (EMAD, "Conditioning").

``position``    place in its sequence, counted from 1.
``confidence``  top-1 probability at the first probe.
``frequency``   rank bucket, in the calibration corpus, of the token predicted there.

Two features make a grid: bin = bucket of the first × buckets of the second + bucket of the second. Dropping the second
feature joins the bins of one row of that grid into their *parent*; dropping both leaves one bin of all tokens. A bin
seen too rarely in calibration takes the thresholds of its nearest ancestor that was seen often enough.

Rank buckets are cut at V^(1/3) and V^(2/3): under Zipf's law the mass of ranks a…b grows as log(b/a), so each of the
three holds about a third of the text, whatever the vocabulary.
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.point import BinSpec
from emad_ref.record import Ints


def bin_index(spec: BinSpec, position: NDArray[Any], confidence: NDArray[Any], top1: NDArray[Any]) -> NDArray[np.intp]:
    """Bin of each token, the shape of ``position`` (from 1); features that ``spec`` does not name are not looked at.

    Edges of confidence are rounded to float32, as the probabilities are: replay and decoding must agree on equality.

    Raises:
        BadArgument: a position below 1, a confidence that is not a number, a token without a bucket.
    """
    index = np.zeros(np.shape(position), dtype=np.intp)
    for feature, buckets in zip(spec.features, spec.buckets, strict=True):
        bucket: NDArray[Any]
        if feature == "position":
            _require_all(np.asarray(position) >= 1, "position", position, "positions counted from 1")
            bucket = np.searchsorted(np.asarray(spec.position_edges), position, side="left")
        elif feature == "confidence":
            _require_all(~np.isnan(confidence), "confidence", confidence, "top-1 probabilities, not NaN")
            bucket = np.searchsorted(np.asarray(spec.confidence_edges, dtype=np.float32), confidence, side="right")
        else:
            table, ids = np.frombuffer(spec.frequency, dtype=np.uint8), np.asarray(top1, dtype=np.int64)
            _require_all((ids >= 0) & (ids < len(table)), "top1", top1, f"token ids in 0–{len(table) - 1}")
            bucket = table[ids]
        index = index * buckets + bucket
    return index


def _require_all(good: NDArray[np.bool_], name: str, value: NDArray[Any], expected: str) -> None:
    if not good.all():
        offending = np.asarray(value)[~good].ravel()[0]
        raise BadArgument(name, offending.item(), expected, "this token belongs to no bin")


def ancestors(spec: BinSpec, dropped: int) -> Ints:
    """int64 [count] bin of each bin once the last ``dropped`` features are gone; 0 leaves the bins themselves."""
    kept = len(spec.buckets) - dropped
    if not 0 <= kept <= len(spec.buckets):
        raise BadArgument("dropped", dropped, f"0–{len(spec.buckets)} features")
    return np.arange(spec.count) // math.prod(spec.buckets[kept:])


def features_dropped(spec: BinSpec, tokens: Ints, minimum: int) -> Ints:
    """int64 [count] features each bin gives up until ``minimum`` tokens stand behind its thresholds.

    ``tokens`` int64 [count] counts the tokens of each bin. All tokens together are never too few: nothing is left then.

    Raises:
        BadArgument: counts of another number of bins.
    """
    if np.shape(tokens) != (spec.count,):
        raise BadArgument("tokens", np.shape(tokens), f"one count per bin ({spec.count})")
    dropped = np.zeros(spec.count, dtype=np.int64)
    for level in range(len(spec.features)):
        ancestor = ancestors(spec, level)
        behind = np.bincount(ancestor, weights=tokens)[ancestor]
        dropped[behind < minimum] = level + 1
    return dropped


def rank_edges(vocabulary: int) -> tuple[int, int]:
    """Last rank, from 1, of the most frequent bucket and of the middle one: V^(1/3) and V^(2/3), rounded."""
    return round(vocabulary ** (1 / 3)), round(vocabulary ** (2 / 3))


def frequency_buckets(counts: Ints) -> bytes:
    """One byte per token id: 0 for the most frequent, 1, 2 for the rest; ``counts`` int64 [V] of a corpus.

    Equal counts rank by id, and tokens that never occurred come last.

    Raises:
        BadArgument: fewer than 8 ids, which three buckets cannot sort; a corpus without tokens.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or len(counts) < 8:
        raise BadArgument("counts", counts.shape, "one count per token id, at least 8", "condition on another feature")
    if counts.sum() == 0:
        raise BadArgument("counts", "all 0", "at least one token", "the corpus is empty")
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    return np.searchsorted(rank_edges(len(counts)), rank, side="left").astype(np.uint8).tobytes()


def bin_names(spec: BinSpec) -> tuple[str, ...]:
    """What each bin holds, for people: ``position 33–128, confidence 0.4–0.7``; one ``all tokens`` without features."""
    named = {
        "position": _ranges([1, *(edge + 1 for edge in spec.position_edges)], [*spec.position_edges]),
        "confidence": [f"{a:g}–{b:g}" for a, b in pairwise([0, *spec.confidence_edges, 1])],
        "frequency": [f"rank {word}" for word in ("high", "middle", "low")],
    }
    cells = [
        [f"{feature} {name}" for name in named[feature][:buckets]]
        for feature, buckets in zip(spec.features, spec.buckets, strict=True)
    ]
    return tuple(", ".join(cell) for cell in product(*cells)) if cells else ("all tokens",)


def _ranges(first: list[int], last: list[int]) -> list[str]:
    """``1–32``, ``33–128``, ``129+``: one more first than last."""
    return [*(f"{a}–{b}" for a, b in zip(first, last, strict=False)), f"{first[-1]}+"]
