"""EMAD against its baselines: sweeps by replay, Pareto fronts chosen on validation and judged on evaluation.

Confidence rules of early exits have their own table, on the first windows of both splits.
``EntropySlopeAndMarginGain`` relates the slope of a model's entropy profile to EMAD's gain on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.stats import permutation_test, spearmanr

from emad_ref.absent import Absent
from emad_ref.calibration.trace import Trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import EMAD_FAMILY
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats
from emad_ref.replay.grids import (
    SAVING_LEVELS,
    SETTINGS_PER_FAMILY,
    NetSavingFunction,
    ThresholdSweep,
    confidence_sweep,
    evenly_spaced_points,
    margin_points,
    point_families,
)
from emad_ref.replay.losses import Column, LossColumn, Losses, choose_margin_point, replay_losses
from emad_ref.signals import SIGNALS, perplexity_from_nats, perplexity_rise_from_nats
from emad_ref.text.documents import Split as Of
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.early_exits import RULES, EarlyExitRule, scale_minimum_exit_layers
from pytest_emad.measurements.traces import LensTraces
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.fronts import PointFamily, compare_families_at_saving_levels
from pytest_emad.statistics.rates import estimate_entropy_slope
from pytest_emad.sweep.front import FamilyFront

# the rules of the early-exit claims, and every other early-exit rule unpruned
CONFIDENCES = RULES | {
    signal.label: EarlyExitRule(signal.name)
    for signal in SIGNALS.values()
    if signal.early_exit and signal.name not in {rule.signal for rule in RULES.values()}
}
# documents of either split for confidence rules; perplexity needs 30
WINDOWS: dict[str, dict[Of, int]] = {
    "smoke": {"validate": 16, "evaluate": 30},
    "standard": {"validate": 60, "evaluate": 100},
    "full": {"validate": 150, "evaluate": 300},
}
SPLITS: tuple[Of, Of] = ("validate", "evaluate")
SHOWN = 1_999  # bootstrap samples of non-deciding intervals
SHOWN_METRIC: dict[LossColumn, str] = {"nats": "perplexity", "wrong": "accuracy"}  # in tables
WRONG = ("wrong over EMAD %", "wrong over EMAD interval %")


class FamilyComparison:
    """Families of points on the same text of two splits, each replayed on first use.

    ``make``: the families by name, spaced by savings on the validation split. ``absent``: rule without a family on
    this model → why.
    """

    def __init__(
        self,
        geometry: Geometry,
        trace: Callable[[Of], Trace],
        make: Callable[[NetSavingFunction], dict[str, list[OperatingPoint]]],
        absent: Mapping[str, Absent] = MappingProxyType({}),
    ):
        self.geometry, self._trace, self._make = geometry, trace, make
        self.absent = absent
        self._losses: dict[tuple[str, Of], Losses] = {}

    @cached_property
    def validation_trace(self) -> Trace:
        return self._trace("validate")

    @cached_property
    def evaluation_trace(self) -> Trace:
        return self._trace("evaluate")

    @cached_property
    def points_by_family(self) -> dict[str, list[OperatingPoint]]:
        """Family name in tables → its points."""
        return self._make(NetSavingFunction(self.validation_trace, self.geometry))

    # ------------------------------------------------------------ at equal FLOPs

    def losses(self, name: str, of: Of) -> Losses:
        """Losses of full depth and then of the family's points on a split."""
        if (name, of) not in self._losses:
            self._losses[name, of] = self._replayed(self.points_by_family[name], of)
        return self._losses[name, of]

    def choose_quality_metric(self, name: str) -> LossColumn:
        """Criterion of a family's front: ``nats``, or ``wrong`` if any point's perplexity is infinite.

        A pruned vocabulary that loses next tokens makes it infinite.
        """
        return "nats" if all(np.isfinite(self.losses(name, of).nats).all() for of in SPLITS) else "wrong"

    def replay_point_family_by_document(self, name: str, by: LossColumn = "nats") -> PointFamily:
        """A family by document, full depth first."""
        return PointFamily(self.losses(name, "validate"), self.losses(name, "evaluate"), by)

    def make_family_of_points(self, points: Sequence[OperatingPoint]) -> PointFamily:
        """Full depth and ``points`` outside the tables' families, by document."""
        return PointFamily(self._replayed(points, "validate"), self._replayed(points, "evaluate"))

    def _replayed(self, points: Sequence[OperatingPoint], of: Of) -> Losses:
        trace = self.validation_trace if of == "validate" else self.evaluation_trace
        return replay_losses(trace, self.geometry, points)

    # ------------------------------------------------------------ the table

    def make_pareto_rows(self, seed: int, levels: Sequence[float] = SAVING_LEVELS) -> list[dict[str, Any]]:
        """Rows by net saving and family: the mixture chosen on validation, and its losses on evaluation.

        Within a saving, the least rise comes first. At each level all families that reach it on validation save exactly
        the same on evaluation: the level, or the largest saving that all reach there. ``over EMAD``: perplexity over
        EMAD's; if perplexity is infinite (None), the share of wrong next tokens over EMAD's (``wrong over EMAD``).
        Intervals are two-sided 95 %, by document, over selection and evaluation.
        """
        fronts = {
            name: self.replay_point_family_by_document(name, self.choose_quality_metric(name))
            for name in self.points_by_family
        }
        reached = {level: self._common(fronts, level) for level in levels}
        savings = {level: saving for level, saving in reached.items() if saving is not None}
        over = {name: self._over_emad(name, family, savings, seed) for name, family in fronts.items()}
        rows = [
            self._row(name, family.front, saving, over[name].get(saving))
            for level, saving in savings.items()
            for name, family in fronts.items()
            if family.largest_validation_saving >= level
        ]
        if all(row["chosen by"] == SHOWN_METRIC["nats"] for row in rows):
            rows = [{name: value for name, value in row.items() if name not in WRONG} for row in rows]
        return sort_by_saving_and_rise(rows)

    def _common(self, fronts: dict[str, PointFamily], level: float) -> float | None:
        reached = [
            family.front.largest_saving for family in fronts.values() if family.largest_validation_saving >= level
        ]
        return min([level, *reached]) if reached else None

    def _over_emad(
        self, name: str, family: PointFamily, savings: dict[float, float], seed: int
    ) -> dict[float, Estimate]:
        if name == EMAD_FAMILY:
            return {}
        emad = self.replay_point_family_by_document(EMAD_FAMILY, self.choose_quality_metric(name))
        both = [
            saving
            for level, saving in savings.items()
            if level <= min(family.largest_validation_saving, emad.largest_validation_saving)
        ]
        rng = np.random.default_rng(seed)
        comparisons = compare_families_at_saving_levels(
            family, emad, both, threshold=0.0, rng=rng, unit="per token", resamples=SHOWN
        )
        return {each.level: each.estimate for each in comparisons if each.estimate is not None}

    def _row(self, name: str, front: FamilyFront, saving: float, over: Estimate | None) -> dict[str, Any]:
        mixed, table = front.mix_corners_to_saving(saving), front.judged
        by = self.choose_quality_metric(name)

        def mean(column: Column) -> tuple[float, float]:
            """Per token, of the mixture and of full depth."""
            means = table.means(column)
            return float(mixed.expectation_of_point_values(means)[0]), float(means[0])

        nll, full_nll = mean("nats") if by == "nats" else (None, None)
        wrong, full_wrong = mean("wrong")
        return {
            "net reduction %": saving,
            "family": name,
            "point": front.describe_mixture(mixed),
            "chosen by": SHOWN_METRIC[by],
            "documents": len(table.tokens),
            "windows": self.evaluation_trace.n_sequences,
            "mean depth": mean("depth")[0],
            "perplexity": None if nll is None else perplexity_from_nats(nll),
            "rise %": None if nll is None or full_nll is None else perplexity_rise_from_nats(nll - full_nll),
            **_difference_columns(over, by),
            "accuracy %": 1 - wrong,
            "accuracy lost %": wrong - full_wrong,
        }


def _difference_columns(over: Estimate | None, by: LossColumn) -> dict[str, Any]:
    """Perplexity over EMAD's as a share, wrong tokens over EMAD's in points; None without a comparison."""
    columns: dict[str, Any] = dict.fromkeys(("over EMAD %", "over EMAD interval %"))
    columns |= dict.fromkeys(WRONG)
    if over is None:
        return columns
    label, scaled = ("over EMAD", perplexity_rise_from_nats) if by == "nats" else ("wrong over EMAD", float)
    bounds = [scaled(bound) for bound in (over.low, over.high)]
    finite = bool(np.isfinite(bounds).all())
    return columns | {f"{label} %": scaled(over.value), f"{label} interval %": bounds if finite else None}


def sort_by_saving_and_rise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one text by net saving, then by rise; those without one last, by lost accuracy."""

    def rank(row: dict[str, Any]) -> tuple[float, float, float]:
        rise = row["rise %"]
        return row["net reduction %"], np.inf if rise is None else rise, row["accuracy lost %"]

    return sorted(rows, key=rank)


class BaselineComparison(FamilyComparison):
    """On all text of both splits; the first family is EMAD as published. Another: ``confidence_rule_comparison``."""

    def __init__(self, traces: LensTraces):
        subject = traces.subject

        def make(saved: NetSavingFunction) -> dict[str, list[OperatingPoint]]:
            return point_families(traces.profile, traces.calibration, saved, SETTINGS_PER_FAMILY)

        super().__init__(
            subject.loaded.geometry,
            lambda of: traces.validation if of == "validate" else traces.evaluation,
            make,
        )
        self._traces = traces

    @cached_property
    def confidence_rule_comparison(self) -> FamilyComparison:
        """The confidence rules' sweeps."""
        return make_confidence_comparison(self._traces)

    def make_pareto_tables(self) -> Attachments:
        """Pareto tables of all families and of early exits.

        Notes name rules without a family, and the reason for a missing perplexity.
        """
        subject, seed = self._traces.subject, self._traces.subject.seed
        rows, early, notes = self.make_pareto_rows(seed), list[dict[str, Any]](), list[str]()
        titled = {f"best perplexity at equal net FLOPs on {subject.corpus}": rows}
        if subject.reductions_note:
            notes.append(
                f"{subject.name}: early exits are not compared: their rules read a head after every layer, too "
                "much for a model of this size; --emad-budget standard compares them"
            )
        else:
            notes += [
                f"{subject.name}: early exit: {rule} is not on the Pareto table: {absent.reason}"
                for rule, absent in self.confidence_rule_comparison.absent.items()
            ]
            early = self.confidence_rule_comparison.make_pareto_rows(seed)
            windows = self.confidence_rule_comparison.evaluation_trace.n_sequences
            titled[f"early exits at equal net FLOPs on the first {windows} windows of {subject.corpus}"] = early
        if not rows:
            notes.append(f"{subject.name}: no point of any sweep saves 15 % of FLOPs net")
        if any(row["perplexity"] is None for row in early):
            notes.append(f"{subject.name}: no perplexity: a pruned vocabulary lost a next token, and it is infinite")
        tables = tuple(AttachedTable(title, table_rows, "pareto") for title, table_rows in titled.items() if table_rows)
        return Attachments(tables, tuple(notes))


def make_confidence_comparison(traces: LensTraces) -> FamilyComparison:
    """Confidence rules and EMAD on the first windows of both splits, as readouts cost several times a plain trace."""
    subject = traces.subject
    layers, vocabulary = subject.stepper.layers, subject.stepper.vocabulary_size
    dials, absent = dict[str, ThresholdSweep](), dict[str, Absent]()
    for name, rule in CONFIDENCES.items():
        minimum = scale_minimum_exit_layers(layers)[0]
        try:
            dial = confidence_sweep(rule.signal, layers, vocabulary, minimum, rule.pruning, rule.alpha)
            dials[f"early exit: {name}"] = dial
        except BadArgument as refusal:  # a vocabulary too small to prune, or too few layers
            absent[name] = Absent(str(refusal), "premise")
    extremes = [dial.point(dial.most) for dial in dials.values()]
    traced = [point for point in extremes if point.confidence is not None]

    def sequences(of: Of) -> list[TokenSequence]:
        return subject.cut_windows(of, getattr(subject.budget, of))[: WINDOWS[subject.budget.name][of]]

    def make(saved: NetSavingFunction) -> dict[str, list[OperatingPoint]]:
        rules = {name: evenly_spaced_points(dial, saved, SETTINGS_PER_FAMILY) for name, dial in dials.items()}
        return {EMAD_FAMILY: margin_points(traces.profile, saved, SETTINGS_PER_FAMILY)} | rules

    def trace(of: Of) -> Trace:
        return subject.take_lens_trace(sequences(of), f"{of} early exits, {subject.corpus}", rules=traced)

    return FamilyComparison(subject.loaded.geometry, trace, make, absent)


LEAST_PROFILES = 4  # of three points, all orders but one differ from a falling line by a single swap


@dataclass(frozen=True)
class EntropySlopeAndMarginGain:
    """One model on one corpus. ``slope`` of mean H_ℓ over ℓ in nats per layer; nearer to zero is flatter.

    ``gain``: net FLOP reduction of the margin ``point`` ("no margin" if none saves).
    """

    model: str
    corpus: str
    slope: Estimate
    point: str
    gain: float


def measure_entropy_slope_and_gain(
    traces: LensTraces, rivals: BaselineComparison, rng: np.random.Generator
) -> EntropySlopeAndMarginGain:
    """Flatness of a model on its corpus."""
    slope = estimate_entropy_slope(*traces.entropy_sums, threshold=0.0, rng=rng)
    point, saved, _ = measure_best_margin_gain(rivals)
    return EntropySlopeAndMarginGain(traces.subject.name, traces.subject.corpus, slope, point, saved)


MarginGain = tuple[str, float, float]  # name of a margin; net share of FLOPs saved, and rise, on the evaluation split


def measure_best_margin_gain(rivals: BaselineComparison) -> MarginGain:
    """Gain of the margin that saves most within F1's bounds on validation; "no margin" without one."""
    best = choose_margin_point(rivals.losses(EMAD_FAMILY, "validate"))
    if isinstance(best, Absent) or best.net_reduction <= 0:  # probes that never fire cost more than they save
        return "no margin", 0.0, 0.0
    judged = rivals.losses(EMAD_FAMILY, "evaluate")[best.index]
    return best.point.name, judged.net_reduction, judged.perplexity_rise


def correlate_entropy_slope_with_gain(dots: Sequence[EntropySlopeAndMarginGain]) -> tuple[float, float]:
    """(Spearman ρ of steepness and gain, exact two-sided p); the paper expects ρ > 0. NaN where all gains are equal.

    Raises:
        BadArgument: fewer than ``LEAST_PROFILES``.
    """
    if len(dots) < LEAST_PROFILES:
        raise BadArgument("dots", len(dots), f"at least {LEAST_PROFILES} models or corpora", "judge more of them")
    steepness, gain = np.array([-dot.slope.value for dot in dots]), np.array([dot.gain for dot in dots])
    if np.ptp(gain) == 0 or np.ptp(steepness) == 0:
        return float("nan"), 1.0

    def rho(order: Floats) -> float:
        return float(spearmanr(order, gain).statistic)

    exact = permutation_test((steepness,), rho, permutation_type="pairings", n_resamples=np.inf)
    return float(exact.statistic), float(exact.pvalue)
