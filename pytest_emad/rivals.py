"""EMAD beside its rivals: whole sweeps by replay, chosen on the validation split, compared on the evaluation split.

The confidence rules of early exits stand on the same table, from the paper's first minimum layer on. What they see is
read after every layer by heads, contrasts and pruned heads of their own, several times the cost of a plain trace: they
are traced on the first windows of both splits, and EMAD stands beside them on the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.sweep.families import EMAD, families, pareto_rows, ranked
from emad_ref.sweep.grids import early_exits, emad_margins
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.sweep.pareto import LEVELS, Duel, duels
from emad_ref.verdict.interval import Estimate, perplexity_rise
from pytest_emad.exits import RULES, minimum_layers
from pytest_emad.options import MARGINS

if TYPE_CHECKING:
    import numpy as np

    from emad_ref.models.geometry import Geometry
    from emad_ref.text.documents import Split
    from pytest_emad.session import Evidence

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

    def __init__(self, evidence: Evidence):
        traces: dict[Split, Callable[[], Trace]] = {
            "validate": lambda: evidence.validation,
            "evaluate": lambda: evidence.evaluation,
        }
        swept = families(evidence.profile, evidence.calibration, MARGINS)
        super().__init__(swept, evidence.loaded.geometry, lambda split: traces[split]())
        self._evidence = evidence

    def duels(self, rival: str) -> list[Duel]:
        """EMAD against a family, at every net reduction both reach on the validation split."""
        return duels(self.validated[EMAD], self.validated[rival])

    def compared(self, duel: Duel, rng: np.random.Generator) -> Estimate:
        """Relative rise of perplexity of EMAD over the rival on the evaluation split, paired by document."""
        mine, theirs = (self.evaluated(point) for point in (duel.ours, duel.rival))
        evidence = self._evidence
        return perplexity_rise(
            evidence.by_document(mine.nll_nats),
            evidence.by_document(theirs.nll_nats),
            evidence.by_document(evidence.evaluation.lengths),
            threshold=0.0,
            rng=rng,
        )

    @cached_property
    def confident(self) -> Confident:
        """The confidence rules' sweeps."""
        return Confident(self._evidence)

    def table(self, levels: Sequence[float] = LEVELS) -> list[dict[str, Any]]:
        """Every family of both sweeps by net reduction."""
        return ranked([*self.rows(levels), *self.confident.rows(levels)])


class Confident(Sweep):
    """The confidence rules on the first windows of both splits, and EMAD beside them.

    ``refused``: why a rule has no family on this model, by name.
    """

    def __init__(self, evidence: Evidence):
        layers, vocabulary = evidence.stepper.layers, evidence.stepper.vocabulary
        beside = {EMAD_BESIDE: emad_margins(evidence.profile, MARGINS)}
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
            whole = {"validate": evidence.budget.validate, "evaluate": evidence.budget.evaluate}[split]
            first = evidence.sequences(split, whole)[: WINDOWS[evidence.budget.name][split]]
            return evidence.trace(first, f"{split} early exits, {evidence.corpus}", rules=traced)

        super().__init__(beside | rules, evidence.loaded.geometry, trace)
