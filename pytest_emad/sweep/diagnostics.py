"""Diagnostics of a point: readouts, estimators and depth, reported with the verdicts.

``input_echo_rate_by_layer``          share of tokens whose top-1 after layer ℓ is the input token: a tied unembedding
                                      gives this for a state that is still its own embedding, with low entropy and no
                                      prediction
``entropy_agreement_auroc_by_layer``  AUROC of low entropy after layer ℓ for "top-1 is already the last layer's"; 0.5 is
                                      chance
``compare_estimator``                 agreement of an entropy estimator with the full softmax (claim EMAD-E4):
                                      Spearman's ρ, bias, RMSE after correction, recall@K, share of exit decisions that
                                      change
``layer_reliability``                 confidence against accuracy after every layer (Early-exit LLMs, Figures 2 and 3),
                                      with ECE = Σ_b (n_b / n) · |accuracy of bin b − mean confidence of bin b|, equal
                                      bins
``published_efficiency_gain``         the paper's own formula d²·V·L / (d²·k·(L − j) + d²·V·j) < L / j
                                      (``efficiency_gain_bound``). It charges full readouts below j, which the rule does
                                      not need, and d²·V where one costs d·V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from emad_ref.calibration.trace import Trace
from emad_ref.models.geometry import Geometry
from emad_ref.point import ConfidenceParameters, EntropyEstimator, OperatingPoint
from emad_ref.probes.pruned_vocabulary import vocabulary_size_at_confidence
from emad_ref.record import READOUTS, Bools, Floats, Ints, Work
from emad_ref.replay.losses import tokens_before_depth_by_sequence
from emad_ref.replay.replay import replay_depths
from emad_ref.signals import SIGNALS


@dataclass(frozen=True)
class DepthMeansInPositionRange:
    """Means over the ``tokens`` decided at positions ``first`` to ``last``, counted from 1; depths in layers."""

    first: int
    last: int
    tokens: int
    depth: float
    free_depth: float
    entropy_nats: float


def input_echo_rate_by_layer(trace: Trace) -> Floats:
    """[L] share of tokens whose top-1 is the input token."""
    rates: Floats = (trace.top1 == trace.token[:, None]).mean(axis=0)
    return rates


def entropy_agreement_auroc_by_layer(trace: Trace) -> Floats:
    """[L] AUROC of low entropy for agreement with the last layer's top-1; NaN if all or none agree."""
    agrees = trace.top1 == trace.top1[:, -1:]
    return np.array([_auroc(agrees[:, layer], -trace.entropy_nats[:, layer]) for layer in range(trace.layers)])


def _auroc(labels: Bools, scores: NDArray[np.floating]) -> float:
    """AUROC: P(a positive scores above a negative) + ½ P(they tie), Mann and Whitney's U / n₁n₂; NaN without both."""
    positives, negatives = scores[labels], scores[~labels]
    if not len(positives) or not len(negatives):
        return math.nan
    statistic = stats.mannwhitneyu(positives, negatives, method="asymptotic").statistic
    return float(statistic) / (len(positives) * len(negatives))


def final_layer_agreement_rate(trace: Trace) -> Floats:
    """[L] share of tokens whose top-1 is already the last layer's."""
    rates: Floats = (trace.top1 == trace.top1[:, -1:]).mean(axis=0)
    return rates


def depth_by_position_doubling(trace: Trace, point: OperatingPoint) -> list[DepthMeansInPositionRange]:
    """Rows for positions 1, 2, 3–4, 5–8, … with tokens: mean depths, and entropy of the last layer.

    Depths as in ``replay_monotone_and_free_depths``.
    """
    bound, free = replay_monotone_and_free_depths(trace, point)
    number = np.frexp(trace.position)[1]  # doubling of a position, counted from 0
    rows = []
    for doubling in np.unique(number).tolist():
        inside = number == doubling
        means = (float(values[inside].mean()) for values in (bound, free, trace.entropy_nats[:, -1]))
        rows.append(DepthMeansInPositionRange(2**doubling // 2 + 1, 2**doubling, int(inside.sum()), *means))
    return rows


def replay_monotone_and_free_depths(trace: Trace, point: OperatingPoint) -> tuple[Ints, Ints]:
    """[tokens] each: depth under the monotone schedule, and depth that may rise again."""
    bound, free = (replay_depths(trace, replace(point, schedule=schedule)) for schedule in ("monotone", "free_eager"))
    return bound, free


def median_tokens_until_depth_collapse(trace: Trace, depth: Ints, first_probe: int) -> float:
    """Median over sequences of tokens before ``depth`` [tokens] is at the first probe; inf if most never are."""
    return float(np.median(tokens_before_depth_by_sequence(trace, depth, first_probe)))


NO_RECALL: Mapping[EntropyEstimator, Sequence[float]] = {}


@dataclass(frozen=True)
class EstimatorAgreement:
    """One estimator at one probe, over ``tokens`` tokens.

    ``spearman``   ρ; NaN if either side is constant.
    ``corrected``  whether RMSE and decisions are those of a corrected estimate.
    ``recall``     recall@K, None for an estimator without retrieval or comparison.
    ``changed``    τ in nats → share of decisions that change.
    """

    estimator: EntropyEstimator
    probe: int
    tokens: int
    spearman: float
    bias_nats: float
    rmse_nats: float
    corrected: bool
    recall: float | None
    changed: dict[float, float]


def compare_estimator(
    estimator: EntropyEstimator,
    probe: int,
    raw: Floats,
    full: Floats,
    line: tuple[float, float] | None = None,
    thresholds: Sequence[float] = (),
    recall: float | None = None,
) -> EstimatorAgreement:
    """Compare uncorrected estimates ``raw`` [tokens] with entropies ``full`` [tokens], both in nats.

    ``line``: (slope, intercept) of the correction at this probe. ``thresholds``: τ in nats. Every value is finite.
    """
    raw, full = np.asarray(raw, dtype=np.float64), np.asarray(full, dtype=np.float64)
    assert np.isfinite(raw).all(), "a trace is read at the probes"
    assert np.isfinite(full).all(), "a trace is read at the probes"
    slope, intercept = line or (1.0, 0.0)
    estimate = slope * raw + intercept
    constant = np.ptp(raw) == 0 or np.ptp(full) == 0
    return EstimatorAgreement(
        estimator=estimator,
        probe=probe,
        tokens=len(full),
        spearman=math.nan if constant else float(stats.spearmanr(raw, full).statistic),
        bias_nats=float(np.mean(raw - full)),
        rmse_nats=float(np.sqrt(np.mean((estimate - full) ** 2))),
        corrected=line is not None,
        recall=recall,
        changed={tau: float(np.mean((estimate <= tau) != (full <= tau))) for tau in thresholds},
    )


def compare_estimators(
    probes: Sequence[int],
    full: Floats,
    raw: Mapping[EntropyEstimator, Floats],
    thresholds: Sequence[Sequence[float]] = (),
    recall: Mapping[EntropyEstimator, Sequence[float]] = NO_RECALL,
) -> list[EstimatorAgreement]:
    """One row per estimator and probe, in order.

    Args:
        probes: layers; ``full`` [tokens, probes] entropies after them, nats.
        raw: uncorrected estimates [tokens, probes] by estimator; its own corrections are applied here.
        thresholds: per probe the τ to compare decisions at, in nats; none by default.
        recall: recall@K per probe, by estimator, if measured.
    """
    rows = []
    for estimator, table in raw.items():
        for i, probe in enumerate(probes):
            rows.append(
                compare_estimator(
                    estimator,
                    probe,
                    table[:, i],
                    full[:, i],
                    estimator.correction[i] if estimator.correction else None,
                    thresholds[i] if thresholds else (),
                    recall[estimator][i] if estimator in recall else None,
                )
            )
    return rows


FULL_READOUT, SUBSET_READOUT = READOUTS.index("full"), READOUTS.index("subset")
RANK_QUANTILES = (0.25, 0.5, 0.75, 0.95)
CALIBRATION_BINS = 10


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

    The rank counts the tokens with strictly larger logits, so ties get the best rank among them.
    """
    array = np.asarray(logits)
    final = array[:, -1].argmax(axis=-1)
    own = np.take_along_axis(array, np.broadcast_to(final[:, None, None], (*array.shape[:2], 1)), axis=-1)
    ranks: Ints = 1 + (array > own).sum(axis=-1)
    return ranks


def quantiles_of_ranks_by_layer(ranks: Ints, quantiles: Sequence[float] = RANK_QUANTILES) -> Floats:
    """[L, quantiles] of ranks [tokens, L]; observed ranks, without interpolation."""
    result: Floats = np.quantile(ranks, quantiles, axis=0, method="inverted_cdf").T.astype(np.float64)
    return result


def expected_calibration_error(confidence: NDArray[np.floating], correct: Bools, bins: int = CALIBRATION_BINS) -> float:
    """ECE of ``confidence`` [tokens] in [0, 1] for ``correct`` bool [tokens], over ``bins`` bins of equal width."""
    confidences, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct)
    assert ((confidences >= 0) & (confidences <= 1)).all(), "a share of a distribution"
    place = np.minimum((confidences * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, weights=right - confidences, minlength=bins)
    return float(np.abs(gap).sum() / len(confidences))


def layer_reliability(confidence: NDArray[np.floating], correct: Bools) -> list[LayerReliability]:
    """One row per layer, of ``confidence`` and ``correct`` [tokens, L]."""
    confidences, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct)
    return [
        LayerReliability(
            layer,
            len(confidences),
            float(confidences[:, layer - 1].mean()),
            float(right[:, layer - 1].mean()),
            expected_calibration_error(confidences[:, layer - 1], right[:, layer - 1]),
        )
        for layer in range(1, confidences.shape[1] + 1)
    ]


def pruned_vocabulary_size_at_probe(
    confidence: ConfidenceParameters, probe: int, vocabulary: int, certainty: float
) -> int:
    """k at probe number ``probe``, for confidence ``certainty`` at the probe below.

    Probe 0 is the minimum layer, which keeps all. The adaptive k depends on the text; a narrowed vocabulary does not
    widen, which has no effect at constant certainty.
    """
    if probe == 0:
        return vocabulary
    if confidence.shrink is not None:
        return vocabulary_size_at_confidence(vocabulary, confidence.shrink, certainty)
    return min(vocabulary, confidence.kept[probe - 1])


def token_work_without_exit(
    point: OperatingPoint, geometry: Geometry, keys: int = 1, source_keys: int = 0, certainty: float = 1.0
) -> Work:
    """Work of one decided token that reads every probe of ``point`` and exits at the ceiling.

    Args:
        point: of ``exit_rules.early_exit_point``, or without probes.
        geometry: of a model of ``point.layers`` layers.
        keys, source_keys: positions attended to, of its own and of a source, whose K and V exist already.
        certainty: confidence at every probe, which decides the adaptive k: 1 prunes most.
    """
    assert point.layers == geometry.layers, "a point of this model"
    work, confidence = Work.none(point.layers), point.confidence
    work.tokens[: point.ceiling] = 1
    work.context[: point.ceiling] = keys
    work.cross_context[: point.ceiling] = source_keys
    work.readout_rows[FULL_READOUT, point.ceiling - 1] = 1
    for probe, layer in enumerate(point.probes):
        if SIGNALS[point.signal].cost is None:
            continue  # compares states, without a readout
        if confidence is None or not confidence.prunes_vocabulary or probe == 0:
            work.readout_rows[FULL_READOUT, layer - 1] = 1
            continue
        projection = geometry.hidden * geometry.embedding_width if geometry.hidden != geometry.embedding_width else 0
        k = pruned_vocabulary_size_at_probe(confidence, probe, geometry.vocabulary, certainty)
        work.readout_rows[SUBSET_READOUT, layer - 1] = 1
        work.readout_macs[SUBSET_READOUT, layer - 1] = k * geometry.embedding_width + projection
    return work


def published_efficiency_gain(layers: int, vocabulary: int, minimum: int, k: int) -> float:
    """V·L / (k·(L − j) + V·j): the paper's efficiency formula, j ``minimum`` with 1 ≤ j < L."""
    return vocabulary * layers / (k * (layers - minimum) + vocabulary * minimum)


def efficiency_gain_bound(layers: int, minimum: int) -> float:
    """L / j, which the paper's formula approaches as k goes to 0."""
    return layers / minimum
