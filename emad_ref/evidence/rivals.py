"""EMAD beside its rivals: whole sweeps by replay, fronts chosen on the validation split and judged on evaluation.

The confidence rules of early exits are swept from the paper's first minimum layer on. What they see is read after every
layer by heads, contrasts and pruned heads of their own, several times the cost of a plain trace: they are traced on the
first windows of both splits. Perplexities of other text do not compare, so they have a table of their own, with EMAD
on the same windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.trace import TokenSequence, Trace
from emad_ref.errors import BadArgument
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.exits import RULES, minimum_layers
from emad_ref.evidence.subject import Subject
from emad_ref.evidence.traces import Traces, documents_of
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.record import Floats
from emad_ref.signals import perplexity_of, relative_rise
from emad_ref.sweep.families import EMAD, LEVELS, SETTINGS, families
from emad_ref.sweep.front import Front
from emad_ref.sweep.grids import Dial, Spacing, confidences, emad_margins, evenly
from emad_ref.sweep.losses import Columns, Loss, columns, loss_table
from emad_ref.text.documents import Split as Of
from emad_ref.verdict.dominance import Family, Split, at_equal_flops
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.units import ByDocument

CONFIDENCES = {**RULES, "saturation": ("saturation", "none")}  # name → (signal, pruning)
# of either split, on which confidence rules are traced; 30 are the least that METHODS lets perplexity be judged by
WINDOWS: dict[str, dict[Of, int]] = {
    "smoke": {"validate": 16, "evaluate": 30},
    "standard": {"validate": 60, "evaluate": 100},
    "full": {"validate": 150, "evaluate": 300},
}
SPLITS: tuple[Of, Of] = ("validate", "evaluate")
SHOWN = 1_999  # bootstrap samples of an interval that is only shown: no p-value of the table decides anything
PERPLEXITY, ACCURACY = "perplexity", "accuracy"  # what a front is chosen by → the column that it is made of
WRONG = ("wrong over EMAD %", "wrong over EMAD interval %")
COLUMN = {PERPLEXITY: "nll_nats", ACCURACY: "wrong"}


class Sweep:
    """Families of points on the same text of two splits, replayed when first asked for and kept.

    ``make``: the families by name, from what points save on the validation split.
    """

    def __init__(
        self,
        geometry: Geometry,
        sequences: Callable[[Of], list[TokenSequence]],
        trace: Callable[[Of], Trace],
        make: Callable[[Spacing], dict[str, list[OperatingPoint]]],
    ):
        self.geometry, self._sequences, self._trace, self._make = geometry, sequences, trace, make
        self._evaluated: dict[OperatingPoint, Loss] = {}
        self._columns: dict[tuple[str, Of], Columns] = {}

    @cached_property
    def validation(self) -> Trace:
        return self._trace("validate")

    @cached_property
    def evaluation(self) -> Trace:
        return self._trace("evaluate")

    @cached_property
    def families(self) -> dict[str, list[OperatingPoint]]:
        """Points by the name of their family in tables."""
        return self._make(Spacing(self.validation, self.geometry))

    def validated(self, name: str) -> list[Loss]:
        """Validation losses of a family."""
        return loss_table(self.validation, self.geometry, self.families[name])

    @cached_property
    def validated_full(self) -> Loss:
        """Full depth on the validation split."""
        (reference,) = loss_table(self.validation, self.geometry, [full_depth(self.validation.layers)])
        return reference

    def evaluated(self, point: OperatingPoint) -> Loss:
        """The evaluation loss of one point."""
        if point not in self._evaluated:
            (self._evaluated[point],) = loss_table(self.evaluation, self.geometry, [point])
        return self._evaluated[point]

    # ------------------------------------------------------------ at equal FLOPs

    def columns(self, name: str, of: Of) -> Columns:
        """What full depth and then the family's points lose and cost on every window of a split."""
        if (name, of) not in self._columns:
            self._columns[name, of] = self._replayed(self.families[name], of)
        return self._columns[name, of]

    def chosen_by(self, name: str) -> str:
        """What a family's front is made of: ``perplexity``, or ``accuracy`` where that of any point is infinite.

        A pruned rule loses next tokens at most thresholds. Where it happens to lose none, as where every token leaves
        before anything is pruned, its perplexity is finite and says nothing of the others.
        """
        finite = all(np.isfinite(self.columns(name, of).nll_nats).all() for of in SPLITS)
        return PERPLEXITY if finite else ACCURACY

    def family(self, name: str, by: str = PERPLEXITY) -> Family:
        """A family by document, full depth first."""
        return self._family(self.families[name], lambda of: self.columns(name, of), by)

    def family_of(self, points: Sequence[OperatingPoint]) -> Family:
        """Full depth and ``points``, which belong to no family of the tables, by document."""
        return self._family(points, lambda of: self._replayed(points, of), PERPLEXITY)

    def _replayed(self, points: Sequence[OperatingPoint], of: Of) -> Columns:
        trace = self._traced(of)
        return columns(trace, self.geometry, [full_depth(trace.layers), *points])

    def _family(self, points: Sequence[OperatingPoint], found: Callable[[Of], Columns], by: str) -> Family:
        def split(of: Of) -> Split:
            here = found(of)
            loss, flops = (self._by_document(values, of) for values in (getattr(here, COLUMN[by]), here.flops))
            return Split(loss, flops, self._by_document(self._traced(of).lengths, of))

        return Family(("full depth", *(point.name for point in points)), split("validate"), split("evaluate"))

    def _by_document(self, values: NDArray[Any], of: Of) -> ByDocument:
        return ByDocument.summed(values, documents_of(self._sequences(of)))

    def _traced(self, of: Of) -> Trace:
        return self.validation if of == "validate" else self.evaluation

    # ------------------------------------------------------------ the table

    def table(self, seed: int, levels: Sequence[float] = LEVELS) -> list[dict[str, Any]]:
        """Per net saving and family, by its rise: the mixture chosen on validation, and what it does on evaluation.

        At each level all families that reach it on validation save exactly the same on evaluation: the level, or the
        most that all of them reach there. A family that never saves so much has no row. ``over EMAD``: its perplexity
        over EMAD's; where perplexity is infinite, which stands as None, its share of next tokens told wrong over
        EMAD's stands as ``wrong over EMAD``. Intervals are two-sided 95 %, by document, over selection and evaluation.
        """
        fronts = {name: self.family(name, self.chosen_by(name)) for name in self.families}
        reached = {level: self._common(fronts, level) for level in levels}
        savings = {level: saving for level, saving in reached.items() if saving is not None}
        over = {name: self._over_emad(name, family, savings, seed) for name, family in fronts.items()}
        rows = [
            self._row(name, family.front, saving, over[name].get(saving))
            for level, saving in savings.items()
            for name, family in fronts.items()
            if family.promised >= level
        ]
        if all(row["chosen by"] == PERPLEXITY for row in rows):
            rows = [{name: value for name, value in row.items() if name not in WRONG} for row in rows]
        return ranked(rows)

    def _common(self, fronts: dict[str, Family], level: float) -> float | None:
        reached = [family.front.reach for family in fronts.values() if family.promised >= level]
        return min([level, *reached]) if reached else None

    def _over_emad(self, name: str, family: Family, savings: dict[float, float], seed: int) -> dict[float, Estimate]:
        if name == EMAD:
            return {}
        emad = self.family(EMAD, self.chosen_by(name))
        both = [saving for level, saving in savings.items() if level <= min(family.promised, emad.promised)]
        rng = np.random.default_rng(seed)
        met = at_equal_flops(family, emad, both, threshold=0.0, rng=rng, unit="per token", resamples=SHOWN)
        return {each.level: each.estimate for each in met if each.estimate is not None}

    def _row(self, name: str, front: Front, saving: float, over: Estimate | None) -> dict[str, Any]:
        mixed, found, by = front.mixed(saving), self.columns(name, "evaluate"), self.chosen_by(name)
        tokens = int(self.evaluation.lengths.sum())

        def mean(values: Floats) -> tuple[float, float]:
            """Per token, of the mixture and of full depth."""
            return float(mixed.of(values.sum(axis=0))[0] / tokens), float(values[:, 0].sum() / tokens)

        nll, full_nll = mean(found.nll_nats) if by == PERPLEXITY else (None, None)
        wrong, full_wrong = mean(found.wrong)
        return {
            "net reduction %": saving,
            "family": name,
            "point": front.named(mixed),
            "chosen by": by,
            "documents": len(front.sheet.tokens),
            "windows": len(found.wrong),
            "mean depth": mean(found.depth)[0],
            "perplexity": None if nll is None else perplexity_of(nll),
            "rise %": None if nll is None or full_nll is None else relative_rise(nll - full_nll),
            **_over(over, by),
            "accuracy %": 1 - wrong,
            "accuracy lost %": wrong - full_wrong,
        }


def _over(over: Estimate | None, by: str) -> dict[str, Any]:
    """Perplexity over EMAD's as a share, wrong tokens over EMAD's in points; None where there is nothing to compare."""
    columns: dict[str, Any] = dict.fromkeys(("over EMAD %", "over EMAD interval %"))
    columns |= dict.fromkeys(WRONG)
    if over is None:
        return columns
    shown, scaled = ("over EMAD", relative_rise) if by == PERPLEXITY else ("wrong over EMAD", float)
    bounds = [scaled(bound) for bound in (over.low, over.high)]
    finite = bool(np.isfinite(bounds).all())
    return columns | {f"{shown} %": scaled(over.value), f"{shown} interval %": bounds if finite else None}


def ranked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one text by net saving, then by rise; those without one last, by the accuracy they lose."""

    def rank(row: dict[str, Any]) -> tuple[float, float, float]:
        rise = row["rise %"]
        return row["net reduction %"], np.inf if rise is None else rise, row["accuracy lost %"]

    return sorted(rows, key=rank)


class Rivals(Sweep):
    """All text of one model's evidence; the first family is EMAD as published. ``confident`` holds the other rules."""

    def __init__(self, traces: Traces):
        subject = traces.subject
        whole: dict[Of, int] = {"validate": subject.budget.validate, "evaluate": subject.budget.evaluate}

        def make(saved: Spacing) -> dict[str, list[OperatingPoint]]:
            return families(traces.profile, traces.calibration, saved, SETTINGS)

        super().__init__(
            subject.loaded.geometry,
            lambda of: subject.sequences(of, whole[of]),
            lambda of: traces.validation if of == "validate" else traces.evaluation,
            make,
        )
        self._traces = traces

    @cached_property
    def confident(self) -> Confident:
        """The confidence rules' sweeps."""
        return Confident(self._traces)

    def exhibits(self) -> Exhibits:
        """The Pareto tables: every family's front, chosen on validation, at each net saving, judged on evaluation.

        Early exits by replay as well, on the first windows of both splits, monotone as the others. Notes say which rule
        has no place there, that nothing saves enough, why a perplexity is missing.
        """
        subject, seed = self._traces.subject, self._traces.subject.seed
        notes = [
            f"{subject.name}: early exit: {rule} is not on the Pareto table: {reason}"
            for rule, reason in self.confident.refused.items()
        ]
        rows, early = self.table(seed), self.confident.table(seed)
        windows = self.confident.evaluation.sequences
        titled = {
            f"best perplexity at equal net FLOPs on {subject.corpus}": rows,
            f"early exits at equal net FLOPs on the first {windows} windows of {subject.corpus}": early,
        }
        if not rows:
            notes.append(f"{subject.name}: no point of any sweep saves 15 % of FLOPs net")
        if any(row["perplexity"] is None for row in early):
            notes.append(f"{subject.name}: no perplexity: a pruned vocabulary lost a next token, and it is infinite")
        tables = tuple(Table(title, shown, "pareto") for title, shown in titled.items() if shown)
        return Exhibits(tables, tuple(notes))


class Confident(Sweep):
    """The confidence rules on the first windows of both splits, and EMAD beside them.

    ``refused``: why a rule has no family on this model, by name.
    """

    def __init__(self, traces: Traces):
        subject = traces.subject
        dials, self.refused = _dials(subject)
        extremes = [dial.point(dial.most) for dial in dials.values()]
        traced = [point for point in extremes if point.confidence is not None]

        def sequences(of: Of) -> list[TokenSequence]:
            whole = {"validate": subject.budget.validate, "evaluate": subject.budget.evaluate}[of]
            return subject.sequences(of, whole)[: WINDOWS[subject.budget.name][of]]

        def make(saved: Spacing) -> dict[str, list[OperatingPoint]]:
            rules = {name: evenly(dial, saved, SETTINGS) for name, dial in dials.items()}
            return {EMAD: emad_margins(traces.profile, saved, SETTINGS)} | rules

        super().__init__(
            subject.loaded.geometry,
            sequences,
            lambda of: subject.trace(sequences(of), f"{of} early exits, {subject.corpus}", rules=traced),
            make,
        )


def _dials(subject: Subject) -> tuple[dict[str, Dial], dict[str, str]]:
    """Confidence rules by family, and why the others have no room."""
    layers, vocabulary = subject.stepper.layers, subject.stepper.vocabulary
    dials, refused = {}, {}
    for name, (signal, pruning) in CONFIDENCES.items():
        try:
            dials[f"early exit: {name}"] = confidences(signal, layers, vocabulary, minimum_layers(layers)[0], pruning)
        except BadArgument as refusal:  # a vocabulary too small to prune, or too few layers
            refused[name] = str(refusal)
    return dials, refused
