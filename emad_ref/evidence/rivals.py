"""EMAD beside its rivals: whole sweeps by replay, chosen on the validation split, compared on the evaluation split.

The confidence rules of early exits stand on the same table, from the paper's first minimum layer on. What they see is
read after every layer by heads, contrasts and pruned heads of their own, several times the cost of a plain trace: they
are traced on the first windows of both splits, and EMAD stands beside them on the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.exits import RULES, minimum_layers
from emad_ref.evidence.traces import Traces
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.sweep.families import EMAD, SETTINGS, families, pareto_rows, ranked
from emad_ref.sweep.grids import early_exits, emad_margins
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.sweep.pareto import LEVELS, Duel, duels
from emad_ref.text.documents import Split

CONFIDENCES = {**RULES, "saturation": ("saturation", "none")}  # name → (signal, pruning)
# of either split, on which confidence rules are traced; 30 are the least that METHODS lets perplexity be judged by
WINDOWS: dict[str, dict[Split, int]] = {
    "smoke": {"validate": 16, "evaluate": 30},
    "standard": {"validate": 60, "evaluate": 100},
    "full": {"validate": 150, "evaluate": 300},
}
EMAD_BESIDE = "EMAD beside early exits"


class Sweep:
    """Losses of every point of ``families`` on two splits, taken when first asked for and kept.

    ``families``: points by the name of their family in tables.
    """

    def __init__(
        self, families: dict[str, list[OperatingPoint]], geometry: Geometry, trace: Callable[[Split], Trace]
    ) -> None:
        self.families, self._geometry, self._trace = families, geometry, trace
        self._evaluated: dict[OperatingPoint, Loss] = {}

    @cached_property
    def validation(self) -> Trace:
        return self._trace("validate")

    @cached_property
    def evaluation(self) -> Trace:
        return self._trace("evaluate")

    @cached_property
    def validated(self) -> dict[str, list[Loss]]:
        """Validation losses of every family."""
        return {name: loss_table(self.validation, self._geometry, points) for name, points in self.families.items()}

    def evaluated(self, point: OperatingPoint) -> Loss:
        """The evaluation loss of one point."""
        if point not in self._evaluated:
            (self._evaluated[point],) = loss_table(self.evaluation, self._geometry, [point])
        return self._evaluated[point]

    def rows(self, levels: Sequence[float]) -> list[dict[str, Any]]:
        """Per family and net reduction: the best point on validation, and what it does on the evaluation split."""
        return pareto_rows(self.validated, self.evaluated, levels)


class Rivals(Sweep):
    """All text of one model's evidence; the first family is EMAD as published. ``confident`` holds the other rules."""

    def __init__(self, traces: Traces):
        of_split: dict[Split, Callable[[], Trace]] = {
            "validate": lambda: traces.validation,
            "evaluate": lambda: traces.evaluation,
        }
        geometry, swept = traces.subject.loaded.geometry, families(traces.profile, traces.calibration, SETTINGS)
        super().__init__(swept, geometry, lambda split: of_split[split]())
        self._traces = traces

    def duels(self, rival: str) -> list[Duel]:
        """EMAD against a family, at every net reduction both reach on the validation split."""
        return duels(self.validated[EMAD], self.validated[rival])

    @cached_property
    def confident(self) -> Confident:
        """The confidence rules' sweeps."""
        return Confident(self._traces)

    def table(self, levels: Sequence[float] = LEVELS) -> list[dict[str, Any]]:
        """Every family of both sweeps by net reduction."""
        return ranked([*self.rows(levels), *self.confident.rows(levels)])

    def exhibits(self) -> Exhibits:
        """The Pareto table: every family's best point on validation at each net reduction, judged on evaluation.

        Early exits stand on it by replay as well, on the first windows of both splits, monotone as the others. Notes
        say which rule has no place on it, that nothing saves enough, why a perplexity is missing.
        """
        name, rows = self._traces.subject.name, self.table()
        notes = [
            f"{name}: early exit: {rule} is not on the Pareto table: {reason}"
            for rule, reason in self.confident.refused.items()
        ]
        if not rows:
            return Exhibits(notes=(*notes, f"{name}: no point of any sweep saves 15 % of FLOPs net"))
        if any(row["perplexity"] is None for row in rows):
            notes.append(f"{name}: no perplexity: a pruned vocabulary lost a next token, and it is infinite")
        title = f"best perplexity at equal net FLOPs on {self._traces.subject.corpus}"
        return Exhibits((Table(title, rows, "pareto"),), tuple(notes))


class Confident(Sweep):
    """The confidence rules on the first windows of both splits, and EMAD beside them.

    ``refused``: why a rule has no family on this model, by name.
    """

    def __init__(self, traces: Traces):
        subject = traces.subject
        layers, vocabulary = subject.stepper.layers, subject.stepper.vocabulary
        beside = {EMAD_BESIDE: emad_margins(traces.profile, SETTINGS)}
        rules: dict[str, list[OperatingPoint]] = {}
        self.refused: dict[str, str] = {}
        for name, (signal, pruning) in CONFIDENCES.items():
            try:
                points = early_exits(signal, layers, vocabulary, minimum_layers(layers)[0], pruning)
            except BadArgument as refusal:  # a vocabulary too small to prune, or too few layers
                self.refused[name] = str(refusal)
            else:
                rules[f"early exit: {name}"] = points
        traced = [points[0] for points in rules.values() if points[0].confidence is not None]

        def trace(split: Split) -> Trace:
            whole = {"validate": subject.budget.validate, "evaluate": subject.budget.evaluate}[split]
            first = subject.sequences(split, whole)[: WINDOWS[subject.budget.name][split]]
            return subject.trace(first, f"{split} early exits, {subject.corpus}", rules=traced)

        super().__init__(beside | rules, subject.loaded.geometry, trace)
