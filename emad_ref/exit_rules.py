"""Exit rules: thresholds of points, bins, and the comparison of a signal with its threshold.

``calibrated_entropy_point``  Ĥ_ℓ ≤ τ_ℓ = isotonic(mean H_ℓ) − m      EMAD, "Calibration details"
``fixed_entropy_point``       Ĥ_ℓ ≤ h₀ at every probe                  EMAD, "Baselines"
``early_exit_point``          exit at the first ℓ ≥ j with c_ℓ ≥ λ     CALM; early-exit LLMs, "Methodology"
``is_exit_rule_met``          the comparison at probes
``extrapolate_exits_between_probes``  the comparison between them      EMAD, "Exit to non-probe layers"
``assign_bins``               the row of τ_ℓ of a token                EMAD, "Calibration details: Conditioning"

Confidence rules may prune the vocabulary above j, to k*(ℓ) = max(250, ⌊35000 / (1 + 139·ℓ/24)⌋) tokens as published
for T5-large (24 layers, 32,128 tokens; early-exit LLMs, "Softmax response via decaying pruning"). For other models 24
becomes L, and 250 and 35000 are scaled by |V|/32128.

Thresholds may depend on a bin, one or two coarse features of a token (EMAD, "Conditioning"):

``position``          place in its sequence, counted from 1.
``top1_probability``  that of the readout at the first probe.
``frequency``         rank bucket, in the calibration corpus, of the token predicted there.

Two features make a grid: bin = bucket of the first × buckets of the second + bucket of the second. Dropping the second
feature joins the bins of one row of that grid into their *parent*; dropping both leaves one bin of all tokens. A bin
with too few tokens takes the thresholds of its parent, the bin without its last feature, or of the parent's parent.

Rank buckets are cut at V^(1/3) and V^(2/3): under Zipf's law the mass of ranks a…b grows as log(b/a), so each of the
three holds about a third of the text, whatever the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.point import (
    DECAY_FORMS,
    ConfidenceParameters,
    EntropyEstimator,
    OperatingPoint,
    ScheduleName,
    ThresholdBinSpec,
)
from emad_ref.record import Bools, Floats, Ints
from emad_ref.signals import DIVERGENCE, ENTROPY, RESPONSE, SIGNALS, SINCE_MINIMUM, Signal, required_layers

FULL_READOUT, ONE_BIN = EntropyEstimator(), ThresholdBinSpec()
EXACT_DIGITS = 17  # with so many digits a float64 reads back exactly


def default_probes(layers: int) -> tuple[int, ...]:
    """Default probe layers: every 4 layers, every 8 from 32 layers on (EMAD, "Calibration data"), every 2 below 12."""
    stride = 2 if layers < 12 else 4 if layers < 32 else 8
    return tuple(range(stride, layers, stride))


def calibrated_entropy_point(
    layers: int,
    probes: Sequence[int],
    targets_nats: Sequence[Sequence[float]],
    margin_nats: float = 0.0,
    schedule: ScheduleName = "monotone",
    bins: ThresholdBinSpec = ONE_BIN,
) -> OperatingPoint:
    """EMAD's operating point: exit at the first probe ℓ with entropy Ĥ_ℓ ≤ τ_ℓ.

    Parameters
    ----------
    layers : int
        L of the model.
    probes : sequence of int
        P, ascending layers below the last.
    targets_nats : [bins][probes]
        isotonic(mean H_ℓ) of each bin, nats.
    margin_nats : float
        m: τ_ℓ = targets_nats − m.
    schedule : str
        How exits become depths.
    bins : ThresholdBinSpec
        Features that choose a token's row of targets; one row by default.

    References
    ----------
    EMAD, "Entropy-matched early exit" (τ_ℓ) and "Calibration details" (m, bins).
    """
    return OperatingPoint(
        name=name_of_margin(format_number(margin_nats), schedule, bins),
        family="emad",
        layers=layers,
        ceiling=layers,
        probes=tuple(probes),
        thresholds=tuple(tuple(float(target) - margin_nats for target in row) for row in targets_nats),
        schedule=schedule,
        bins=bins,
        margin_nats=margin_nats,
    )


EMAD_FAMILY = "EMAD, mean − margin"  # in tables


def name_of_margin(margin: str, schedule: ScheduleName = "monotone", bins: ThresholdBinSpec = ONE_BIN) -> str:
    """Name of the EMAD point whose margin reads ``margin``, as many digits as tell a set of points apart."""
    return name_with_schedule_and_bins(f"emad m={margin}", schedule, bins)


def name_with_schedule_and_bins(name: str, schedule: ScheduleName, bins: ThresholdBinSpec) -> str:
    """``name`` of a point with the settings that are not the default: ``emad m=0.10 free_eager by position``."""
    followed = name if schedule == "monotone" else f"{name} {schedule}"
    return f"{followed} by {bins.name}" if bins.features else followed


def format_number(number: float) -> str:
    """``number`` with two decimals if exact, else with four digits, so that names of a sweep's points are distinct."""
    return f"{number:.2f}" if round(number, 2) == number else f"{number:.4g}"


def format_numbers_distinctly(numbers: Sequence[float]) -> list[str]:
    """Each number as by ``format_number``, with more digits where two different numbers would look equal.

    >>> format_numbers_distinctly([0.3, 0.300001, 0.3, 0.5])
    ['0.30', '0.300001', '0.30', '0.50']
    """
    texts = [format_number(number) for number in numbers]
    for digits in range(5, EXACT_DIGITS + 1):
        read: dict[float, set[float]] = {}  # value as read back → numbers with this text
        for text, number in zip(texts, numbers, strict=True):
            read.setdefault(float(text), set()).add(number)
        texts = [
            text if float(text) == number or len(read[float(text)]) == 1 else f"{number:.{digits}g}"
            for text, number in zip(texts, numbers, strict=True)
        ]
    return texts


# names of point families in files, where they differ from the signal's name
FAMILY_NAMES = {ENTROPY.name: "fixed_entropy", DIVERGENCE.name: DIVERGENCE.label}


def threshold_point(
    signal: Signal, layers: int, probes: Sequence[int], threshold: float, estimator: EntropyEstimator = FULL_READOUT
) -> OperatingPoint:
    """A monotone point with one ``threshold`` on a ``signal`` without parameters for every probe."""
    symbol = f"{signal.label} τ" if signal.thresholds is None else signal.thresholds.symbol
    return OperatingPoint(
        name=f"{symbol}={format_number(threshold)}",
        family=FAMILY_NAMES.get(signal.name, signal.name),
        layers=layers,
        ceiling=layers,
        probes=tuple(probes),
        thresholds=((threshold,) * len(tuple(probes)),),
        estimator=estimator,
        signal=signal.name,
    )


def fixed_entropy_point(layers: int, probes: Sequence[int], h0_nats: float) -> OperatingPoint:
    """A point with one threshold for every probe, τ_ℓ = h₀, without a profile (EMAD, "Baselines")."""
    return threshold_point(ENTROPY, layers, probes, h0_nats)


def softmax_response_point(layers: int, probes: Sequence[int], threshold: float) -> OperatingPoint:
    """The softmax-response point (CALM): exit where c_ℓ, top-1 minus top-2 probability, is ≥ λ; > 1 never exits."""
    return threshold_point(RESPONSE, layers, probes, threshold)


def decayed_threshold(
    point: OperatingPoint, threshold: NDArray[np.floating[Any]], decided: NDArray[np.integer[Any]]
) -> Floats:
    """Thresholds λ of ``point`` as they have fallen at tokens t; float64, in the shape of both arguments broadcast.

    ``free``: λ·(0.9 + 0.1·exp(−rate·t/N)), in the code of FREE (Bae et al., 2023) and of the early-exit LLMs.
    ``calm``: 0.9·λ + 0.1·exp(−rate·t/N) (CALM, Eq. 5). CALM clips it to [0, 1], where it lies for every λ in [0, 1].

    ``threshold``: λ. ``decided``: t, the index from 0 of a token among the decided ones of its sequence.
    """
    assert point.decay is not None
    rate, longest = point.decay
    remaining, full = np.exp(-rate * decided.astype(np.float64) / longest), threshold.astype(np.float64)
    fallen: Floats = 0.9 * full + 0.1 * remaining if point.decay_form == "calm" else full * (0.9 + 0.1 * remaining)
    return fallen


def is_exit_rule_met(
    point: OperatingPoint,
    column: int,
    signal: NDArray[np.floating[Any]],
    bins: NDArray[np.integer[Any]] | None = None,
    decided: NDArray[np.integer[Any]] | None = None,
) -> Bools:
    """Whether the rule at layer ℓ = ``point.probes[column]`` fires on ``signal``, any shape; NaN never fires.

    Ĥ_ℓ ≤ τ_ℓ for a signal that falls with certainty (EMAD, "Entropy-matched early exit"), c_ℓ ≥ τ_ℓ for one that rises
    (CALM; early-exit LLMs, "Early Exiting Via the Softmax Approach").

    ``bins``: row of thresholds of each signal, in the shape of ``signal``; required if there are several rows.
    ``decided``: index of each token among the decided ones of its sequence, in a shape that broadcasts to ``signal``'s;
    required if thresholds decay.

    Replay and decoding both compare here, and between probes in ``extrapolate_exits_between_probes``. Signal and
    threshold are rounded to float32, so that a threshold between two floats gives the same decision everywhere.

    Raises:
        BadArgument: several rows of thresholds without bins, decaying ones without the tokens' indices.
    """
    thresholds, signal = point.threshold_table[:, column], signal.astype(np.float32, copy=False)
    if bins is None and len(thresholds) > 1:
        raise BadArgument(
            "bins", None, f"a bin in 0–{len(thresholds) - 1} for every signal", "see exit_rules.assign_bins"
        )
    threshold = thresholds[0] if bins is None else thresholds[bins]
    if point.decay is not None:
        if decided is None:
            raise BadArgument("decided", None, "the index of every decided token", "these thresholds fall with it")
        threshold = decayed_threshold(point, threshold, decided).astype(np.float32)
    fired: Bools = signal <= threshold if SIGNALS[point.signal].sense == "falls" else signal >= threshold
    return fired


def first_firing_probe(fired: Bools, probes: Ints, ceiling: int) -> Ints:
    """The smallest ℓ of P that fires [n], ``ceiling`` where none does; ``fired`` [n, probes], ``probes`` ascending."""
    if len(probes) == 0:
        return np.full(len(fired), ceiling, dtype=np.int64)
    first = np.argmax(fired, axis=1)
    return np.where(fired.any(axis=1), np.asarray(probes, dtype=np.int64)[first], ceiling)


def extrapolate_exits_between_probes(
    point: OperatingPoint,
    column: int,
    before: NDArray[np.floating[Any]],
    here: NDArray[np.floating[Any]],
    bins: NDArray[np.integer[Any]] | None = None,
) -> Ints:
    """First layer between ``point.probes[column]`` and the next at which extrapolation meets the threshold; else 0.

    Ĥ_ℓ continues the line through the readings ``before`` and ``here`` at the last two probes, τ_ℓ lies on the line
    between the thresholds of this probe and the next (EMAD, "Exit to non-probe layers").
    After the last probe there is no next threshold, and after the first there is no line. Readings are rounded to
    float32, as in ``is_exit_rule_met``.
    """
    before, here = (reading.astype(np.float32, copy=False) for reading in (before, here))
    none = np.zeros(here.shape, dtype=np.int64)
    if not 0 < column < len(point.probes) - 1:
        return none
    left, at, right = point.probes[column - 1 : column + 2]
    near, far = (
        point.threshold_table[0, i] if bins is None else point.threshold_table[bins, i] for i in (column, column + 1)
    )
    slope = (here - before) / np.float32(at - left)
    for layer in reversed(range(at + 1, right)):  # the shallowest crossing layer is written last
        share = np.float32((layer - at) / (right - at))
        expected, threshold = here + slope * np.float32(layer - at), near + (far - near) * share
        met = expected <= threshold if SIGNALS[point.signal].sense == "falls" else expected >= threshold
        np.copyto(none, layer, where=met)
    return none


PUBLISHED_LAYERS, PUBLISHED_VOCABULARY = 24, 32_128  # T5-large, on which k* was fitted
MIN_KEPT, MAX_KEPT, STEEPNESS = 250, 35_000, 139  # of k*
SHRINK = 0.9  # s: share of the vocabulary that a readout of confidence 1 prunes ("via adaptive pruning")
ALPHA = 0.1  # α of the plausible tokens ("Contrastive Decoding")


def kept_vocabulary_size(layer: int, layers: int, vocabulary: int) -> int:
    """k*: tokens that readouts after ``layer`` keep, for a model of ``layers`` layers and ``vocabulary`` tokens.

    Early-exit LLMs, "Softmax response via decaying pruning".

    >>> [kept_vocabulary_size(layer, 24, 32_128) for layer in (2, 7, 19)]
    [2781, 842, 315]

    Raises:
        BadArgument: a layer the model lacks, or a vocabulary of which less than two tokens would be kept.
    """
    if not 1 <= layer <= layers:
        raise BadArgument("layer", layer, f"a layer in 1–{layers}")
    scale = vocabulary / PUBLISHED_VOCABULARY
    # scaled before the floor: ⌊2781.4⌋ · |V|/32128 would lose up to a token per unit of scale
    k = max(math.floor(MIN_KEPT * scale), math.floor(MAX_KEPT * scale / (1 + STEEPNESS * layer / layers)))
    if k < 2:
        least = math.ceil(2 * PUBLISHED_VOCABULARY / MIN_KEPT)
        raise BadArgument("vocabulary", vocabulary, f"{least} tokens, of which two can be kept", "do not prune it")
    return k


@dataclass(frozen=True)
class VocabularyPruningSpec:
    """``kept``: k of each layer after j; ``shrink``: s of the adaptive rule. Neither: the whole vocabulary."""

    kept: tuple[int, ...] = ()
    shrink: float | None = None


# (minimum layer, layers, vocabulary) → sizes
PRUNINGS: dict[str, Callable[[int, int, int], VocabularyPruningSpec]] = {
    "none": lambda minimum, layers, vocabulary: VocabularyPruningSpec(),
    "fixed": lambda minimum, layers, vocabulary: VocabularyPruningSpec(
        (kept_vocabulary_size(minimum, layers, vocabulary),) * (layers - 1 - minimum)
    ),
    "decaying": lambda minimum, layers, vocabulary: VocabularyPruningSpec(
        tuple(kept_vocabulary_size(layer, layers, vocabulary) for layer in range(minimum + 1, layers))
    ),
    "adaptive": lambda minimum, layers, vocabulary: VocabularyPruningSpec(shrink=SHRINK),
}
CONFIDENCES: tuple[str, ...] = tuple(name for name, signal in SIGNALS.items() if signal.early_exit)


def early_exit_point(
    signal: str,
    layers: int,
    vocabulary: int,
    minimum: int,
    threshold: float = 0.9,
    *,
    pruning: str = "none",
    schedule: ScheduleName = "copying",
    decay: tuple[float, float] | None = None,
    decay_form: str = DECAY_FORMS[0],
    alpha: float = ALPHA,
    alpha_decay: float | None = None,
    emit: str = "contrastive",
    rescale: bool = False,
    amateurs_from: int | None = None,
) -> OperatingPoint:
    """The operating point of one early-exit rule.

    ``signal``: of ``CONFIDENCES``. ``layers``, ``vocabulary``: L and |V| of the model. ``minimum``: j.
    ``threshold``: λ; above 1 no token exits. ``pruning``: of ``PRUNINGS``. ``decay``: (rate, N), and
    ``decay_form``: see ``OperatingPoint``. ``alpha``, ``alpha_decay``, ``emit``, ``rescale``: of the contrasts, see
    ``ConfidenceParameters``. ``amateurs_from``: for JSD without pruning, the first layer below j to contrast with;
    None: j itself.

    Raises:
        BadArgument: unknown names, a minimum without a layer to decide at, a combination without meaning.
    """
    for name, value, known in (("signal", signal, CONFIDENCES), ("pruning", pruning, PRUNINGS)):
        if value not in known:
            raise BadArgument(name, value, f"one of {', '.join(known)}")
    if pruning != "none" and minimum >= layers - 1:
        raise BadArgument("minimum", minimum, f"a layer in 1–{layers - 2}", "after it no layer is read but the last")
    since = minimum if amateurs_from is None else amateurs_from
    if since != minimum and not (SIGNALS[signal].needs is SINCE_MINIMUM and pruning == "none" and 1 <= since < minimum):
        expected = f"a layer in 1–{minimum - 1}, for jsd_contrast without pruning"
        raise BadArgument("amateurs_from", amateurs_from, expected, "a race is read from its minimum layer on")
    probes, first = required_layers(signal, since, layers), max(minimum, since + SIGNALS[signal].needs.delay)
    sizes = PRUNINGS[pruning](minimum, layers, vocabulary)
    confidence = ConfidenceParameters(since, alpha, alpha_decay, emit, rescale, sizes.kept, sizes.shrink)
    return OperatingPoint(
        name=_point_name(signal, pruning, minimum, confidence, threshold, schedule, decay, decay_form),
        family=signal if pruning == "none" else f"{signal} {pruning}",
        layers=layers,
        ceiling=layers,
        probes=probes,
        thresholds=(tuple(threshold if layer >= first else math.inf for layer in probes),),
        schedule=schedule,
        signal=signal,
        # a decision by one full readout uses only values of a lens trace: the point replays like any other
        confidence=confidence if SIGNALS[signal].needs_confidence_parameters or pruning != "none" else None,
        decay=decay,
        decay_form=decay_form,
    )


def _point_name(
    signal: str,
    pruning: str,
    minimum: int,
    confidence: ConfidenceParameters,
    threshold: float,
    schedule: str,
    decay: tuple[float, float] | None,
    decay_form: str,
) -> str:
    """Name with all settings that distinguish points of one sweep."""
    parts = [
        (signal.replace("_", " "), True),
        (pruning, pruning != "none"),
        (f"j={minimum} λ={format_number(threshold)}", True),
        (f"amateurs from {confidence.minimum}", confidence.minimum != minimum),
        (f"α={format_number(confidence.alpha)}", SIGNALS[signal].is_contrastive),
        (f"α′ rate={format_number(confidence.alpha_decay or 0.0)}", confidence.alpha_decay is not None),
        (confidence.emit, confidence.emit != "contrastive"),
        ("rescaled", confidence.rescale),
        ("decay={}/{}".format(*map(format_number, decay or (0.0, 0.0))), decay is not None),
        (decay_form, decay_form != DECAY_FORMS[0]),
        (schedule, schedule != "monotone"),
    ]
    return " ".join(part for part, said in parts if said)


def assign_bins(
    spec: ThresholdBinSpec, position: NDArray[Any], top1_probability: NDArray[Any], top1: NDArray[Any]
) -> NDArray[np.intp]:
    """Bin of each token (EMAD, "Calibration details: Conditioning"), in the shape of ``position`` (from 1).

    Uses only the features that ``spec`` names. Edges of ``top1_probability`` are rounded to float32, as probabilities
    are, so that replay and decoding agree on equality.

    Raises:
        BadArgument: a position below 1, a probability that is not a number, a token without a bucket.
    """
    index = np.zeros(np.shape(position), dtype=np.intp)
    for feature, buckets in zip(spec.features, spec.buckets_per_feature, strict=True):
        bucket: NDArray[Any]
        if feature == "position":
            _require_all(np.asarray(position) >= 1, "position", position, "positions counted from 1")
            bucket = np.searchsorted(np.asarray(spec.position_edges), position, side="left")
        elif feature == "top1_probability":
            known = ~np.isnan(top1_probability)
            _require_all(known, "top1_probability", top1_probability, "top-1 probabilities, not NaN")
            edges = np.asarray(spec.top1_probability_edges, dtype=np.float32)
            bucket = np.searchsorted(edges, top1_probability, side="right")
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


def bin_indices_without_last_features(spec: ThresholdBinSpec, dropped: int) -> Ints:
    """int64 [count] bin of each bin without the last ``dropped`` features; 0 leaves the bins as they are."""
    kept = len(spec.buckets_per_feature) - dropped
    if not 0 <= kept <= len(spec.buckets_per_feature):
        raise BadArgument("dropped", dropped, f"0–{len(spec.buckets_per_feature)} features")
    return np.arange(spec.bin_count) // math.prod(spec.buckets_per_feature[kept:])


def dropped_feature_count_by_bin(spec: ThresholdBinSpec, tokens: Ints, minimum: int) -> Ints:
    """int64 [count] features that each bin drops until its thresholds rest on ``minimum`` tokens.

    ``tokens`` int64 [count] counts the tokens of each bin. A bin of all tokens has no feature left to drop.

    Raises:
        BadArgument: ``tokens`` for another number of bins.
    """
    if np.shape(tokens) != (spec.bin_count,):
        raise BadArgument("tokens", np.shape(tokens), f"one count per bin ({spec.bin_count})")
    dropped = np.zeros(spec.bin_count, dtype=np.int64)
    for level in range(len(spec.features)):
        parent = bin_indices_without_last_features(spec, level)
        tokens_of_parent = np.bincount(parent, weights=tokens)[parent]
        dropped[tokens_of_parent < minimum] = level + 1
    return dropped


def frequency_rank_edges(vocabulary: int) -> tuple[int, int]:
    """Last rank, from 1, of the most frequent bucket and of the middle one: V^(1/3) and V^(2/3), rounded."""
    return round(vocabulary ** (1 / 3)), round(vocabulary ** (2 / 3))


def assign_frequency_buckets(counts: Ints) -> bytes:
    """Frequency bucket of each token id, one byte each: 0 most frequent, 2 rarest; ``counts`` int64 [V] of a corpus.

    Equal counts rank by id, and tokens that never occurred come last.

    Raises:
        BadArgument: fewer than 8 ids, too few for three buckets; a corpus without tokens.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or len(counts) < 8:
        raise BadArgument("counts", counts.shape, "one count per token id, at least 8", "condition on another feature")
    if counts.sum() == 0:
        raise BadArgument("counts", "all 0", "at least one token", "the corpus is empty")
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    return np.searchsorted(frequency_rank_edges(len(counts)), rank, side="left").astype(np.uint8).tobytes()


def bin_names(spec: ThresholdBinSpec) -> tuple[str, ...]:
    """Name of each bin, such as ``position 33–128, top1_probability 0.4–0.7``; ``all tokens`` without features."""
    named = {
        "position": _ranges([1, *(edge + 1 for edge in spec.position_edges)], [*spec.position_edges]),
        "top1_probability": [f"{a:g}–{b:g}" for a, b in pairwise([0, *spec.top1_probability_edges, 1])],
        "frequency": [f"rank {word}" for word in ("high", "middle", "low")],
    }
    cells = [
        [f"{feature} {name}" for name in named[feature][:buckets]]
        for feature, buckets in zip(spec.features, spec.buckets_per_feature, strict=True)
    ]
    return tuple(", ".join(cell) for cell in product(*cells)) if cells else ("all tokens",)


def _ranges(first: list[int], last: list[int]) -> list[str]:
    """Names of ranges, such as ``1–32``, ``33–128``, ``129+``; one more first than last."""
    return [*(f"{a}–{b}" for a, b in zip(first, last, strict=False)), f"{first[-1]}+"]
