"""Ablations of EMAD: one function per varied component of an operating point; each returns its table and notes.

Thresholds come from the calibration split, rows from replays of the evaluation split; intervals resample its documents.
State copying is decoded on the openings of documents. This module decides no claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from emad_ref.absent import Absent
from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.decoding.teacher_forcing import teacher_force
from emad_ref.exit_rules import bin_names, default_probes
from emad_ref.flop_ledger import flops
from emad_ref.models.bundled import bundled_model_names
from emad_ref.models.geometry import Geometry
from emad_ref.models.stepper import Stepper
from emad_ref.point import FEATURES, EntropyEstimator, OperatingPoint, ScheduleName
from emad_ref.probes.estimators import ExactIndex, LowRankIndex, low_rank_factors, recall_at_k_by_row
from emad_ref.protocol import Unsupported
from emad_ref.record import Floats, Work
from emad_ref.replay.grids import CHUNK_LENGTHS, NetSavingFunction, margin_points, positional_depth_points
from emad_ref.replay.losses import PointLoss, gross_saving, replay_losses
from emad_ref.replay.replay import compute_replayed_decode_work, replay, replay_depths
from emad_ref.signals import perplexity_from_nats, perplexity_rise_from_nats
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.measurements.pareto import (
    LEAST_PROFILES,
    EntropySlopeAndMarginGain,
    correlate_entropy_slope_with_gain,
    measure_entropy_slope_and_gain,
)
from pytest_emad.statistics.legs import interval_if_finite
from pytest_emad.statistics.rates import RESAMPLES, draw_document_counts, estimate_point_rise
from pytest_emad.statistics.speedup import estimate_total_speedup
from pytest_emad.statistics.units import ByPair
from pytest_emad.sweep.diagnostics import (
    compare_estimators,
    final_layer_agreement_rate,
    median_tokens_until_depth_collapse,
)

TRIED_MARGINS = {"smoke": 2, "standard": 4, "full": 8}  # margins per profile, by budget
BEFORE = "tokens before first probe"
COUNTED = 60  # most windows whose exits are counted

TableRow = dict[str, Any]


def require_available_quality_and_replay(evidence: ModelMeasurements) -> None:
    """Raise Unsupported if quality cannot be judged, or replay does not hold for the decoder under test."""
    if absent := evidence.subject.absent_quality or evidence.replay_validity.absent_replay:
        raise Unsupported(absent.reason)


def probes_at_stride(layers: int, stride: int) -> tuple[int, ...]:
    """Probes after every ``stride`` layers, except the last layer."""
    return tuple(range(stride, layers, stride))


def make_margin_grid(profile: Profile, budget: str) -> list[float]:
    """Margins in nats from 0 to below the profile's highest target; the budget sets their number."""
    highest = max(profile.targets_nats)
    return [float(m) for m in np.linspace(0.0, highest, TRIED_MARGINS[budget], endpoint=False)]


def make_shared_margin_grid(evidence: ModelMeasurements) -> list[float]:
    """The margins of the run's own profile, common to all profiles of an ablation."""
    return make_margin_grid(evidence.traces.profile, evidence.study.budget.name)


def points_at_margins_with_exits(profile: Profile, margins: Iterable[float]) -> list[OperatingPoint]:
    """The profile's point at each margin under which a token can exit."""
    highest = max(max(row) for row in profile.bin_targets_nats or (profile.targets_nats,))
    return [profile.point(margin) for margin in margins if margin <= highest]


class AblationRows:
    """Rows of one evaluation split, with intervals from the same resamples of its documents."""

    def __init__(self, evidence: ModelMeasurements, rng: np.random.Generator):
        self._points, self._traces, self._rng = evidence.points, evidence.traces, rng
        self._geometry = evidence.loaded.geometry

    @cached_property
    def _draws(self) -> Floats:
        return draw_document_counts(len(self._traces.document_lengths), RESAMPLES, self._rng)

    def make_point_rows(
        self, points: Sequence[OperatingPoint], first: TableRow, trace: Trace | None = None
    ) -> list[TableRow]:
        """One row per point; ``first``: leading columns. ``trace``: of the same windows, with estimates."""
        trace = self._traces.get_trace_covering("evaluate", points) if trace is None else trace
        return [first | self._row(loss, trace) for loss in list(replay_losses(trace, self._geometry, points))[1:]]

    def make_full_depth_row(self, first: TableRow) -> TableRow:
        """The row of full depth."""
        return self.make_point_rows([self._traces.subject.full_depth_point], first)[0]

    def _row(self, loss: PointLoss, trace: Trace) -> TableRow:
        rise = estimate_point_rise(loss, threshold=0.0, rng=self._rng, draws=self._draws)
        return quality_columns(loss, trace, self._geometry) | {"rise interval %": interval_if_finite(rise)}


def quality_columns(loss: PointLoss, trace: Trace, geometry: Geometry) -> TableRow:
    """Depth, reductions and perplexity of one replay of ``trace``.

    Points whose depth falls to the first probe equally early have equal rows. Column ``BEFORE`` is the median number of
    tokens before that; None without probes or if most sequences never reach it.
    """
    replayed, probes = replay(trace, loss.point), loss.point.probes
    before = median_tokens_until_depth_collapse(trace, replayed.depth, probes[0]) if probes else math.inf
    return {
        "point": loss.point.name,
        "mean depth": loss.mean_depth,
        BEFORE: before if math.isfinite(before) else None,
        "gross reduction %": gross_saving(trace, geometry, replayed),
        "net reduction %": loss.net_reduction,
        "perplexity": loss.perplexity,
        "rise %": loss.perplexity_rise,
    }


NO_SPEED: TableRow = {"speed ×": None, "speed interval": None}


def measure_speed_columns(evidence: ModelMeasurements, points: Mapping[str, OperatingPoint]) -> dict[str, TableRow]:
    """Name → paired speed against full depth at batch 1, with interval; None if the decoder declines the point."""
    accepted = {name: point for name, point in points.items() if _is_accepted(evidence.subject, point)}
    arms = {f"point {name}": point for name, point in accepted.items()}  # "full" is the name of the reference arm
    seconds = evidence.latency.time_against_full_depth(arms).seconds if arms else {}
    columns = dict.fromkeys(points, NO_SPEED)
    for name in accepted:
        ratio = estimate_total_speedup(ByPair(seconds["full"]), ByPair(seconds[f"point {name}"]), threshold=1.0)
        columns[name] = {"speed ×": ratio.value, "speed interval": interval_if_finite(ratio)}
    return columns


def _is_accepted(subject: ModelUnderTest, point: OperatingPoint) -> bool:
    try:
        with subject.open_decoder(point):
            return True
    except Unsupported:
        return False


MARGINS_NATS = (0.0, 0.2)  # a margin is one of the paper's remedies for a shift


def ablate_calibration_corpus(evidence: ModelMeasurements, rng: np.random.Generator) -> Attachments:
    """EMAD, "Calibration stability": every profile on both corpora; on its own corpus it is the reference.

    Raises Unsupported without a second corpus.
    """
    require_available_quality_and_replay(evidence)
    if evidence.on_shifted_corpus is None:
        raise Unsupported(f"no second corpus beside {evidence.corpus}")
    at_hand, table_rows = (evidence, evidence.on_shifted_corpus), []
    profiles = {other.corpus: other.traces.calibrate_profile() for other in at_hand}
    for judged in at_hand:
        rows = AblationRows(judged, rng)
        table_rows.append(rows.make_full_depth_row({"text": judged.corpus, "profile": "none"}))
        for corpus, profile in profiles.items():
            table_rows += rows.make_point_rows(
                points_at_margins_with_exits(profile, MARGINS_NATS), {"text": judged.corpus, "profile": corpus}
            )
    return Attachments((AttachedTable("ablation, calibration corpus", table_rows),))


CONDITIONINGS = [features for count in (0, 1, 2) for features in combinations(FEATURES, count)]


def ablate_threshold_bins(evidence: ModelMeasurements, rng: np.random.Generator) -> Attachments:
    """EMAD, "Ablations": thresholds per bin of every feature and pair of features; notes name rare bins."""
    require_available_quality_and_replay(evidence)
    rows = AblationRows(evidence, rng)
    table, notes = [rows.make_full_depth_row({"features": "–", "bins": 0, "with parent's thresholds": 0})], []
    for features in CONDITIONINGS:
        profile = evidence.traces.calibrate_profile(features=features)
        assert_bin_counts_and_dropped_features(profile, len(evidence.traces.calibration))
        table += rows.make_point_rows(
            points_at_margins_with_exits(profile, make_shared_margin_grid(evidence)), conditioning_columns(profile)
        )
        if note := parent_bin_note(profile):
            notes.append(f"{evidence.name}: {note}")
    return Attachments((AttachedTable(f"ablation, conditioning on {evidence.corpus}", table),), tuple(notes))


def assert_bin_counts_and_dropped_features(profile: Profile, tokens: int) -> None:
    """Check that every calibration token is in a bin, and that a bin has its own thresholds only with enough tokens."""
    statistics, fallen = profile.statistics, np.array(profile.dropped_features, dtype=int) > 0
    assert statistics is not None
    assert statistics.tokens.sum() == tokens, "a calibration token is in no bin"
    few = statistics.tokens < profile.minimum_tokens
    assert not profile.bins.features or (fallen == few).all(), "a bin seen too rarely keeps its own, or another fell"
    assert all(
        len(point.thresholds) == profile.bins.bin_count for point in points_at_margins_with_exits(profile, [0.0])
    )


def conditioning_columns(profile: Profile) -> TableRow:
    """Leading columns: features, number of bins, and number of bins with their parent's thresholds."""
    fallen = sum(dropped > 0 for dropped in profile.dropped_features)
    return {"features": profile.bins.name, "bins": profile.bins.bin_count, "with parent's thresholds": fallen}


def parent_bin_note(profile: Profile) -> str:
    """Note on bins with the thresholds of its parent; empty for none."""
    names = zip(bin_names(profile.bins), profile.dropped_features, strict=False)  # a profile without bins drops none
    fell = [name for name, dropped in names if dropped]
    few = f"fewer than {profile.minimum_tokens} calibration tokens"
    return f"{profile.bins.name}: {few} in {'; '.join(fell)}: thresholds of the parent bin" if fell else ""


KS, RANKS, LOW_RANK_K = (32, 64, 128), (16, 32, 64), 64
ROUNDING_NATS = 1e-3  # precision of a float32 estimate without its linear map, for slopes down to 0.01
# at m = 0; FLOPs determine the time of the others
TIMED_ESTIMATORS = ("full", "topk-64", "lowrank-32 top-64", "linear")


def ablate_estimator(evidence: ModelMeasurements, rng: np.random.Generator) -> Attachments:
    """EMAD, "Ablations": every entropy estimator at every margin, the full softmax first."""
    require_available_quality_and_replay(evidence)
    paper = [
        *(EntropyEstimator("topk", k=k) for k in KS),
        *(EntropyEstimator("lowrank", k=LOW_RANK_K, rank=r) for r in RANKS),
    ]
    estimated = FittedEstimators(
        evidence, [*usable_estimators(evidence.subject.stepper, paper), evidence.entropy_estimators.linear_estimator]
    )
    margins = make_shared_margin_grid(evidence)
    fits = {estimator.name: estimated.measure_agreement(estimator, margins) for estimator in estimated.fitted}
    require_entropy_bounds(fits)
    by_name = {
        (estimator.name, margin): replace(evidence.traces.profile.point(margin), estimator=estimator)
        for estimator in (EntropyEstimator(), *estimated.fitted)
        for margin in margins
    }
    timed = {name: by_name[name, 0.0] for name in TIMED_ESTIMATORS if (name, 0.0) in by_name}
    times = measure_speed_columns(evidence, timed)
    rows, table = AblationRows(evidence, rng), []
    for (name, margin), point in by_name.items():
        cost = {"probe FLOPs per token": estimated.compute_probe_flops_per_token(point)}
        first = {"estimator": name} | agreement_columns(fits.get(name), margin) | cost
        (row,) = rows.make_point_rows([point], first, estimated.trace)
        table.append(row | (times.get(name, NO_SPEED) if margin == 0 else NO_SPEED))
    return Attachments((AttachedTable(f"ablation, entropy estimator on {evidence.corpus}: worst probe", table),))


def require_entropy_bounds(fits: Mapping[str, WorstEstimatorAgreement]) -> None:
    """Check that top-K bounds entropy from above, more tightly for larger K, and that exact search misses no row."""
    exact = [fits[name] for k in KS if (name := EntropyEstimator("topk", k).name) in fits]
    bounds = [fit.bias_nats for fit in exact]
    for fewer, more in pairwise(bounds):
        assert all(a >= b - ROUNDING_NATS for a, b in zip(fewer, more, strict=True)), "Ĥ rises with K"
    assert all(bias >= -ROUNDING_NATS for biases in bounds for bias in biases), "top-K is no upper bound"
    assert all(fit.recall == 1 for fit in exact), "exact search missed a row"


def usable_estimators(stepper: Stepper, estimators: Iterable[EntropyEstimator]) -> list[EntropyEstimator]:
    """The estimators whose k and rank fit this model's unembedding."""
    vocabulary, width = stepper.unembedding.shape
    return [e for e in estimators if e.k <= vocabulary and e.rank <= width]


@dataclass(frozen=True)
class WorstEstimatorAgreement:
    """An estimator against the full softmax, worst over the probes of the run's profile.

    ``changed``: τ's margin in nats → share of tokens whose exit decision changes. ``recall``: None if none is known.
    """

    spearman: float
    bias_nats: tuple[float, ...]
    rmse_nats: float
    recall: float | None
    changed: dict[float, float]


def agreement_columns(fit: WorstEstimatorAgreement | None, margin: float) -> TableRow:
    """Leading columns; the full softmax (None) is its own reference."""
    if fit is None:
        return {"ρ": 1.0, "RMSE, nats": 0.0, "recall@K": None, "decisions changed %": 0.0}
    return {
        "ρ": fit.spearman,
        "RMSE, nats": fit.rmse_nats,
        "recall@K": fit.recall,
        "decisions changed %": fit.changed[margin],
    }


class FittedEstimators:
    """Estimators fitted on calibration and validation text, with a trace of the whole evaluation split by each."""

    def __init__(self, evidence: ModelMeasurements, uncorrected: Sequence[EntropyEstimator]):
        self._estimates, self._profile = evidence.entropy_estimators, evidence.traces.profile
        self._subject = evidence.subject
        self.fitted = self._estimates.correct_estimators(uncorrected)
        self.trace = self._estimates.take_trace_with_estimates("evaluate", evidence.study.budget.evaluate, self.fitted)

    @cached_property
    def _recalls(self) -> dict[tuple[str, int], float]:
        stepper = self._subject.stepper
        counted = RecallCounter(stepper, self.fitted, self._estimates.probes)
        take_trace(stepper, self._subject.cut_windows("evaluate", COUNTED), observe=counted)
        return counted.recall_by_estimator_and_probe

    def measure_agreement(self, estimator: EntropyEstimator, margins: Sequence[float]) -> WorstEstimatorAgreement:
        """Agreement of ``estimator``, one of ``fitted``, with the full softmax."""
        estimates = self._estimates
        raw = estimates.compute_uncorrected_estimates(self.trace, estimator)
        thresholds = [[target - margin for margin in margins] for target in self._profile.targets_nats]
        full = estimates.take_probe_columns(self.trace.entropy_nats)
        rows = compare_estimators(estimates.probes, full, {estimator: raw}, thresholds)
        recalls = [share for (name, _), share in self._recalls.items() if name == estimator.name]
        changes = zip(*(row.changed.values() for row in rows), strict=True)
        return WorstEstimatorAgreement(
            spearman=min(row.spearman for row in rows),
            bias_nats=tuple(row.bias_nats for row in rows),
            rmse_nats=max(row.rmse_nats for row in rows),
            recall=min(recalls, default=None),
            changed={margin: max(shares) for margin, shares in zip(margins, changes, strict=True)},
        )

    def compute_probe_flops_per_token(self, point: OperatingPoint) -> float:
        """FLOPs of readouts per token beyond the one head that emits it."""
        replayed = replay(self.trace, point)
        work = compute_replayed_decode_work(self.trace, replayed)
        geometry = self._subject.loaded.geometry
        readouts = sum(flops(work, geometry).readouts.values())
        return float(readouts / len(self.trace) - geometry.head_flops())


class RecallCounter:
    """Observer that counts, during a trace, how many of the true K largest logits an estimator retrieves.

    ``recall_by_estimator_and_probe``: (estimator, probe) → recall@K. Estimators without retrieval have none.
    """

    def __init__(self, stepper: Stepper, estimators: Iterable[EntropyEstimator], probes: Sequence[int]):
        rows = stepper.unembedding.detach()
        bias = None if stepper.unembedding_bias is None else stepper.unembedding_bias.detach()
        self._stepper, self._probes, self._exact = stepper, frozenset(probes), ExactIndex(rows, bias)
        self._indices = {
            estimator: LowRankIndex(rows, low_rank_factors(rows, estimator.rank), bias)
            if estimator.rank
            else self._exact
            for estimator in estimators
            if estimator.k and estimator.search in ("exact", "lowrank")
        }
        self._hits: dict[tuple[str, int], float] = {}
        self._tokens: dict[int, int] = {}

    def __call__(self, layer: int, states: Tensor, entropy: Tensor) -> None:
        """Count for states [tokens, D] after ``layer``."""
        if layer not in self._probes:
            return
        normed = self._stepper.apply_final_norm(states)
        self._tokens[layer] = self._tokens.get(layer, 0) + len(states)
        for estimator, index in self._indices.items():
            retrieved, true = (each.search(normed, estimator.k)[1] for each in (index, self._exact))
            key = (estimator.name, layer)
            self._hits[key] = self._hits.get(key, 0.0) + float(recall_at_k_by_row(retrieved, true).sum())

    @property
    def recall_by_estimator_and_probe(self) -> dict[tuple[str, int], float]:
        return {key: hits / self._tokens[key[1]] for key, hits in self._hits.items()}


def tabulate_profile_flatness(evidence: ModelMeasurements, rng: np.random.Generator) -> Attachments:
    """EMAD, "Limitations" (EMAD-E11): one row per available model and corpus, the steepest profile first."""
    require_available_quality_and_replay(evidence)
    dots = [
        measure_entropy_slope_and_gain(each.traces, each.baseline_comparison, rng)
        for each in list_model_measurements(evidence)
    ]
    dots.sort(key=lambda dot: dot.slope.value)
    table = AttachedTable("ablation, flatness of the profile", [make_profile_flatness_row(dot) for dot in dots])
    return Attachments((table,), (flatness_gain_correlation_note(evidence.name, dots),))


def list_model_measurements(evidence: ModelMeasurements) -> list[ModelMeasurements]:
    """Each model that continues documents, on its corpus and on the one that shifts it."""
    others = [name for name in bundled_model_names() if name != evidence.name] if evidence.loaded.bundled else []
    models = [evidence, *(other for name in others if not (other := evidence.for_other_model(name)).subject.is_seq2seq)]
    return [each for model in models for each in (model, model.on_shifted_corpus) if each is not None]


def make_profile_flatness_row(dot: EntropySlopeAndMarginGain) -> TableRow:
    return {
        "model": dot.model,
        "corpus": dot.corpus,
        "slope, nats per layer": dot.slope.value,
        "interval": [dot.slope.low, dot.slope.high],
        "net reduction at equal quality %": dot.gain,
        "point": dot.point,
    }


def flatness_gain_correlation_note(name: str, dots: Sequence[EntropySlopeAndMarginGain]) -> str:
    """The trend over ``dots``, or a note that they are too few."""
    if len(dots) < LEAST_PROFILES:
        return f"{name}: {len(dots)} profiles are no trend: EMAD-E11 needs {LEAST_PROFILES}"
    rho, p = correlate_entropy_slope_with_gain(dots)
    return (
        f"EMAD-E11 over {len(dots)} profiles: Spearman ρ of steepness and gain {rho:.2f}, exact p = {p:.3f}; "
        "the paper expects ρ > 0"
    )


# a line and a next threshold need three probes, so twelve layers need stride 3
INTERPOLATED_STRIDES = (3, 4, 6)


def ablate_exit_interpolation(evidence: ModelMeasurements, rng: np.random.Generator) -> Attachments:
    """EMAD, "Ablations": exits to layers between probes, on and off, for each stride; speed at m = 0."""
    require_available_quality_and_replay(evidence)
    layers, rows = evidence.subject.stepper.layers, AblationRows(evidence, rng)
    table_rows: list[TableRow] = []
    notes: list[str] = []
    for stride in (s for s in INTERPOLATED_STRIDES if s < layers):
        profile = evidence.traces.calibrate_profile(probes_at_stride(layers, stride))
        table_rows += interpolation_rows(evidence, rows, profile, stride)
        if not find_interpolated_exit_layers(profile.probes):
            few = f"{evidence.name}: stride {stride} leaves {len(profile.probes)} probes on {layers} layers"
            notes.append(f"{few}: a line through two readings never meets a next threshold, interpolation is off")
    table = AttachedTable(f"ablation, interpolation between probes on {evidence.corpus}", table_rows)
    return Attachments((table,), tuple(notes))


def interpolation_rows(
    evidence: ModelMeasurements, rows: AblationRows, profile: Profile, stride: int
) -> list[TableRow]:
    """Rows of one profile at every margin, interpolation off and on."""
    between, first = find_interpolated_exit_layers(profile.probes), {"stride": stride}
    table: list[TableRow] = []
    for off in points_at_margins_with_exits(profile, make_shared_margin_grid(evidence)):
        on = replace(off, name=f"{off.name} interpolated", interpolate=True)
        arms = {"off": off, "on": on}
        timed = between and off.margin_nats == 0
        times = measure_speed_columns(evidence, arms) if timed else dict.fromkeys(arms, NO_SPEED)
        for name, point in arms.items():
            (row,) = rows.make_point_rows([point], first | {"interpolation": name, "layers between": len(between)})
            table.append(row | times[name])
        require_interpolation_adds_no_depth(evidence.traces.get_trace_covering("evaluate", [off, on]), off, on, between)
    return table


def find_interpolated_exit_layers(probes: Sequence[int]) -> list[int]:
    """Layers strictly between the second probe and the last: outside them a line or a next threshold is missing."""
    return sorted(set(range(probes[1], probes[-1])) - set(probes)) if len(probes) > 2 else []


def require_interpolation_adds_no_depth(
    trace: Trace, off: OperatingPoint, on: OperatingPoint, between: Sequence[int]
) -> None:
    """Check that interpolation never increases a token's depth, and adds exits only at these layers."""
    plain, interpolated = (replay_depths(trace, point) for point in (off, on))
    assert (interpolated <= plain).all()
    assert set(np.unique(interpolated)) <= {*off.probes, *between, off.ceiling}
    assert between or (interpolated == plain).all()


MARGIN_COUNTS = {"smoke": 5, "standard": 9, "full": 33}  # number of margins from 0 up to small savings, by budget


def ablate_margin(evidence: ModelMeasurements, rng: np.random.Generator) -> Attachments:
    """EMAD, "Ablations": full depth, then margins from 0 up, with the accuracy of every replayed task."""
    require_available_quality_and_replay(evidence)
    rows = AblationRows(evidence, rng)
    table = [
        rows.make_full_depth_row({"margin, nats": None}) | accuracy_columns(evidence, evidence.subject.full_depth_point)
    ]
    saved = NetSavingFunction(evidence.traces.validation, evidence.loaded.geometry)
    for point in margin_points(evidence.traces.profile, saved, MARGIN_COUNTS[evidence.study.budget.name]):
        (row,) = rows.make_point_rows([point], {"margin, nats": point.margin_nats})
        table.append(row | accuracy_columns(evidence, point))
    return Attachments((AttachedTable(f"ablation, margin on {evidence.corpus}", table),))


def accuracy_columns(evidence: ModelMeasurements, point: OperatingPoint) -> TableRow:
    """Share right of each replayed task, and the tasks that count at the point; empty without tasks."""
    scored = evidence.task_scores
    tasks = {task: scored.measure_accuracy_against_full_depth(task, point) for task in scored.replayed_task_names}
    counting = ", ".join(task for task, scores in tasks.items() if scores.is_counted) or "none"
    shares: TableRow = {f"{task} %": scores.accuracies[1] for task, scores in tasks.items()}
    return shares | (
        {"tasks that count": None if point == evidence.subject.full_depth_point else counting} if tasks else {}
    )


FREE_SCHEDULES: dict[str, ScheduleName] = {"eager backfill": "free_eager", "deferred fill": "free_deferred"}
COPYING = "state copying"
REPLAYED, OPENED = "evaluation split", "openings"  # text of a row
TIMED_SCHEDULES = ("monotone", *FREE_SCHEDULES, "chunks of 8", "positional")
DECODED, DECODED_TOKENS = 40, 48  # documents, and tokens of each, on which state copying is scored


def ablate_schedule(evidence: ModelMeasurements, rng: np.random.Generator) -> Attachments:
    """EMAD, "Ablations": the same rule under every schedule and margin; speed at m = 0.

    State copying changes later states, so it is decoded, on ``TeacherForcedOpenings``.
    """
    require_available_quality_and_replay(evidence)
    rules = points_at_margins_with_exits(evidence.traces.profile, make_shared_margin_grid(evidence))
    by_margin = {rule.margin_nats: make_points_by_schedule(evidence, rule) for rule in rules}
    first, rule = by_margin[rules[0].margin_nats], rules[0]
    copying = replace(rule, name=f"{rule.name} copying", schedule="copying")
    timed = {name: point for name, point in first.items() if name in TIMED_SCHEDULES}
    times = measure_speed_columns(evidence, timed | {COPYING: copying})
    rows, table, notes = AblationRows(evidence, rng), [], []
    for margin, named in by_margin.items():
        for name, point in named.items():
            speed = times[name] if margin == 0 and name in times else NO_SPEED
            table += [row | speed for row in rows.make_point_rows([point], {"schedule": name, "text": REPLAYED})]
    openings = TeacherForcedOpenings(evidence.subject)
    table += [
        label_openings_row_with_schedule(name, openings.replay_row(first[name]))
        for name in ("monotone", "eager backfill")
    ]
    try:
        copied = openings.decode_row(copying)
    except Unsupported as refusal:
        notes.append(f"{evidence.name}: {COPYING}: not applicable ({refusal})")
    else:
        table.append(label_openings_row_with_schedule(COPYING, copied) | times[COPYING])
    return Attachments((AttachedTable(f"ablation, schedule on {evidence.corpus}", table),), tuple(notes))


def make_points_by_schedule(evidence: ModelMeasurements, rule: OperatingPoint) -> dict[str, OperatingPoint]:
    """The rule under each schedule that replay supports, and positional depth with equal savings."""
    free = {
        name: replace(rule, name=f"{rule.name} {name}", schedule=schedule) for name, schedule in FREE_SCHEDULES.items()
    }
    chunks = {
        f"chunks of {period}": replace(rule, name=f"{rule.name}, chunks of {period}", schedule="chunked", period=period)
        for period in CHUNK_LENGTHS
    }
    positional, geometry = positional_depth_points(rule.layers), evidence.loaded.geometry
    validation = evidence.traces.get_trace_covering("validate", positional)
    table = replay_losses(validation, geometry, [rule, *positional])
    within = table.savings >= table[1].net_reduction
    within[:2] = False  # full depth and the rule itself
    best = table.choose("nats", within)  # chosen on validation, like every point
    return {"monotone": rule, **free, **chunks, **({} if isinstance(best, Absent) else {"positional": best.point})}


def label_openings_row_with_schedule(name: str, row: TableRow) -> TableRow:
    return {"schedule": name, "text": OPENED, **row, "rise interval %": None, **NO_SPEED}


class TeacherForcedOpenings:
    """First tokens of evaluated documents, decoded token by token and replayed, against full depth on the same text."""

    def __init__(self, subject: ModelUnderTest):
        self.subject = subject
        windows = subject.cut_windows("evaluate", DECODED)
        self.texts = [replace(window, tokens=window.tokens[:DECODED_TOKENS]) for window in windows]
        self.trace = take_trace(subject.stepper, self.texts)

    def replay_row(self, point: OperatingPoint) -> TableRow:
        """The row of a point that replay supports."""
        geometry = self.subject.loaded.geometry
        return quality_columns(replay_losses(self.trace, geometry, [point])[1], self.trace, geometry)

    def decode_row(self, point: OperatingPoint) -> TableRow:
        """The row of any point; reductions are None for a decoder that does not count.

        Raises:
            Unsupported: the decoder declines the point.
        """
        full = replay(self.trace, self.subject.full_depth_point)
        with self.subject.open_audited_decoder(point) as decoder:
            forced = [teacher_force(decoder, text) for text in self.texts]
        mean = float(np.concatenate([each.nll_nats for each in forced]).mean())
        works, geometry = [each.work for each in forced if each.work is not None], self.subject.loaded.geometry
        saved: TableRow = dict.fromkeys(("gross reduction %", "net reduction %"))
        if len(works) == len(forced):
            mine = flops(sum(works, Work.none(geometry.layers)), geometry)
            reference = flops(compute_replayed_decode_work(self.trace, full), geometry)
            saved["gross reduction %"] = 1 - mine.blocks_and_attention / reference.blocks_and_attention
            saved["net reduction %"] = 1 - mine.total / reference.total
        return {
            "point": point.name,
            "mean depth": float(np.concatenate([each.depth for each in forced]).mean()),
            BEFORE: None,  # without a trace
            **saved,
            "perplexity": perplexity_from_nats(mean),
            "rise %": perplexity_rise_from_nats(mean - float(full.nll_nats.mean())),
        }


PROBE_STRIDES = (2, 4, 6, 8)


def ablate_stride(evidence: ModelMeasurements, rng: np.random.Generator) -> Attachments:
    """EMAD, "Ablations": a profile for every probe stride, from the same calibration text."""
    require_available_quality_and_replay(evidence)
    rows, named = AblationRows(evidence, rng), make_probes_by_stride(evidence.subject.stepper.layers)
    table_rows = [rows.make_full_depth_row({"probes": "none", "layers": "–"})]
    for name, probes in named.items():
        at = points_at_margins_with_exits(evidence.traces.calibrate_profile(probes), make_shared_margin_grid(evidence))
        assert at, f"{name}: nothing can exit at margin 0"
        table_rows += rows.make_point_rows(at, {"probes": name, "layers": ", ".join(map(str, probes))})
    note = probe_last_layer_agreement_note(
        evidence.traces.evaluation.fully_read_trace, sorted(set().union(*named.values()))
    )
    table = AttachedTable(f"ablation, probe stride on {evidence.corpus}", table_rows)
    return Attachments((table,), (f"{evidence.name}: {note}",))


def make_probes_by_stride(layers: int) -> dict[str, tuple[int, ...]]:
    """Name → probes, of every stride with a probe and of the default, which may be one of them."""
    default = default_probes(layers)
    probes_by_name = {
        f"every {stride}": probes_at_stride(layers, stride) for stride in PROBE_STRIDES if stride < layers
    }
    named = {name + (" (default)" if probes == default else ""): probes for name, probes in probes_by_name.items()}
    return named | ({} if default in probes_by_name.values() else {"default": default})


def probe_last_layer_agreement_note(trace: Trace, probes: Sequence[int]) -> str:
    """Note on the agreement of probed layers with the last; an early-exit loss may have trained only some of them."""
    rates = final_layer_agreement_rate(trace)
    text = ", ".join(f"{rates[layer - 1]:.0%} after layer {layer}" for layer in probes)
    return f"top-1 tokens that are already the last layer's: {text}"
