"""What early exits would read, layer by layer, and what reading costs a token that never exits (early-exit LLMs).

``final_token_ranks``     where each layer's readout places the token that the last layer emits (Figure 1).
``reliability``           confidence against accuracy after every layer (Figures 2 and 3), with

    ECE = Σ_b (n_b / n) · |accuracy of bin b − mean confidence of bin b|        bins of equal width over [0, 1]

``unexited``              the Work of one token that reads every probe and leaves at none.
``published_gain``        the paper's own formula, and ``gain_bound``, what it cannot exceed:

    d²·V·L / (d²·k·(L − j) + d²·V·j)  <  L / j

The formula charges full readouts at layers below j, which the rule never asks for, and d²·V where one costs d·V; the
square cancels. Arrays and points in, numbers out: no model is run here, and no interval is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.models.geometry import Geometry
from emad_ref.point import Confidence, OperatingPoint
from emad_ref.readout.subset import adaptive_size
from emad_ref.record import READOUTS, Bools, Floats, Ints, Work
from emad_ref.signals import SIGNALS

FULL, SUBSET = READOUTS.index("full"), READOUTS.index("subset")
QUANTILES = (0.25, 0.5, 0.75, 0.95)
BINS = 10


@dataclass(frozen=True)
class LayerReliability:
    """One layer over ``tokens`` tokens: mean confidence, accuracy, ECE; all in 0–1."""

    layer: int
    tokens: int
    confidence: float
    accuracy: float
    calibration_error: float


def final_token_ranks(logits: Floats) -> Ints:
    """int64 [tokens, L] rank, from 1, of the last layer's best token after each layer; ``logits`` [tokens, L, V].

    Rank counts the tokens with strictly more: of equals, each has the best rank among them.

    Raises:
        BadArgument: no [tokens, L, V], or one that is empty.
    """
    given = np.asarray(logits)
    if given.ndim != 3 or not given.size:
        raise BadArgument("logits", given.shape, "[tokens, L, V], at least one of each")
    final = given[:, -1].argmax(axis=-1)
    own = np.take_along_axis(given, np.broadcast_to(final[:, None, None], (*given.shape[:2], 1)), axis=-1)
    ranks: Ints = 1 + (given > own).sum(axis=-1)
    return ranks


def rank_quantiles(ranks: Ints, quantiles: Sequence[float] = QUANTILES) -> Floats:
    """[L, quantiles] of ranks [tokens, L]; observed ranks, none between two.

    Raises:
        BadArgument: ranks of another shape, or none.
    """
    given = np.asarray(ranks)
    if given.ndim != 2 or not given.size:
        raise BadArgument("ranks", given.shape, "[tokens, L], at least one of each")
    found: Floats = np.quantile(given, quantiles, axis=0, method="inverted_cdf").T.astype(np.float64)
    return found


def expected_calibration_error(confidence: NDArray[np.floating], correct: Bools, bins: int = BINS) -> float:
    """ECE of ``confidence`` [tokens] in [0, 1] for ``correct`` bool [tokens], over ``bins`` bins of equal width.

    Raises:
        BadArgument: no tokens, other shapes, a confidence outside [0, 1] (NaN included), no bin.
    """
    given, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct)
    if given.ndim != 1 or not given.size or right.shape != given.shape or right.dtype != np.bool_:
        raise BadArgument("confidence, correct", (given.shape, right.shape, right.dtype), "two columns, one of bool")
    if not ((given >= 0) & (given <= 1)).all():
        raise BadArgument("confidence", float(given.min()), "values in [0, 1]")
    if bins < 1:
        raise BadArgument("bins", bins, "at least 1")
    place = np.minimum((given * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, weights=right - given, minlength=bins)
    return float(np.abs(gap).sum() / len(given))


def reliability(confidence: NDArray[np.floating], correct: Bools) -> list[LayerReliability]:
    """One row per layer, of ``confidence`` and ``correct`` [tokens, L].

    Raises:
        BadArgument: shapes that differ, and as in ``expected_calibration_error``.
    """
    given, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct)
    if given.ndim != 2 or given.shape != right.shape:
        raise BadArgument("confidence, correct", (given.shape, right.shape), "two columns [tokens, L]")
    return [
        LayerReliability(
            layer,
            len(given),
            float(given[:, layer - 1].mean()),
            float(right[:, layer - 1].mean()),
            expected_calibration_error(given[:, layer - 1], right[:, layer - 1]),
        )
        for layer in range(1, given.shape[1] + 1)
    ]


def kept(confidence: Confidence, probe: int, vocabulary: int, certainty: float) -> int:
    """k at probe number ``probe`` (0 is the minimum layer, which keeps all), confidence ``certainty`` at the one below.

    The adaptive k depends on the text; a vocabulary once narrowed does not widen, but at constant certainty that does
    not matter.
    """
    if probe == 0:
        return vocabulary
    if confidence.shrink is not None:
        return adaptive_size(vocabulary, confidence.shrink, certainty)
    return min(vocabulary, confidence.kept[probe - 1])


def unexited(
    point: OperatingPoint, geometry: Geometry, keys: int = 1, source_keys: int = 0, certainty: float = 1.0
) -> Work:
    """Work of one decided token that reads every probe of ``point`` and leaves at the ceiling.

    Args:
        point: of ``policy.early_exit``, or without probes.
        geometry: of a model of ``point.layers`` layers.
        keys, source_keys: positions attended to, of its own and of a source; the source's K and V are there already.
        certainty: confidence at every probe, which decides the adaptive k: 1 prunes most.

    Raises:
        BadArgument: another number of layers, keys < 1, a certainty outside 0–1, an estimator other than full.
    """
    if point.layers != geometry.layers:
        raise BadArgument("point.layers", point.layers, f"{geometry.layers}, the layers of the geometry")
    if keys < 1 or source_keys < 0 or not 0 <= certainty <= 1:
        raise BadArgument("keys, source_keys, certainty", (keys, source_keys, certainty), "≥ 1, ≥ 0 and in 0–1")
    if point.estimator.kind != "full":
        raise BadArgument("point.estimator", point.estimator.name, "full", "an estimate has a cost of its own")
    work, confidence = Work.none(point.layers), point.confidence
    work.tokens[: point.ceiling] = 1
    work.context[: point.ceiling] = keys
    work.cross_context[: point.ceiling] = source_keys
    work.readout_rows[FULL, point.ceiling - 1] = 1
    for probe, layer in enumerate(point.probes):
        if SIGNALS[point.signal].cost is None:
            continue  # compares states, reads nothing out
        if confidence is None or not confidence.pruned or probe == 0:
            work.readout_rows[FULL, layer - 1] = 1
            continue
        projection = geometry.hidden * geometry.embedding_width if geometry.hidden != geometry.embedding_width else 0
        k = kept(confidence, probe, geometry.vocabulary, certainty)
        work.readout_rows[SUBSET, layer - 1] = 1
        work.readout_macs[SUBSET, layer - 1] = k * geometry.embedding_width + projection
    return work


def published_gain(layers: int, vocabulary: int, minimum: int, k: int) -> float:
    """V·L / (k·(L − j) + V·j): the paper's efficiency formula, j ``minimum``.

    Raises:
        BadArgument: not 1 ≤ j < L, or not 1 ≤ k ≤ V.
    """
    if not 1 <= minimum < layers:
        raise BadArgument("minimum", minimum, f"a layer in 1–{layers - 1}")
    if not 1 <= k <= vocabulary:
        raise BadArgument("k", k, f"tokens in 1–{vocabulary}")
    return vocabulary * layers / (k * (layers - minimum) + vocabulary * minimum)


def gain_bound(layers: int, minimum: int) -> float:
    """L / j, which the paper's formula approaches as k goes to 0.

    Raises:
        BadArgument: not 1 ≤ j < L.
    """
    if not 1 <= minimum < layers:
        raise BadArgument("minimum", minimum, f"a layer in 1–{layers - 1}")
    return layers / minimum
