"""The operating points that a run puts forward, and what each costs and saves on the evaluation split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from emad_ref.evidence.scored import Scored
from emad_ref.evidence.traces import Traces
from emad_ref.point import OperatingPoint
from emad_ref.sweep.families import SETTINGS
from emad_ref.sweep.grids import Spacing, emad_margins, truncations
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.sweep.select import cheapest_within_bounds
from emad_ref.verdict.units import ByDocument, ByItem

NllPair = tuple[ByDocument, ByDocument, ByDocument]  # NLL sums at the point and at full depth, tokens
AnswerPair = tuple[ByItem, ByItem]  # right at full depth, right at the point


@dataclass(frozen=True)
class PointEvidence:
    """What was measured at one operating point, against full depth on the same documents and items.

    ``net_reduction`` share of decode FLOPs saved, probes and repair charged; ``perplexity`` by corpus, ``tasks`` by
    task name; ``chance`` the accuracy of guessing by task name, 0 where it is not named.
    """

    name: str
    net_reduction: float
    perplexity: Mapping[str, NllPair]
    tasks: Mapping[str, AnswerPair] = field(default_factory=dict)
    chance: Mapping[str, float] = field(default_factory=dict)


class Points:
    """Taken when first asked for and kept."""

    def __init__(self, traces: Traces, scored: Scored):
        self.traces, self.scored = traces, scored
        self.subject = traces.subject

    @cached_property
    def margins(self) -> list[OperatingPoint]:
        """EMAD at margins from 0 up, spaced evenly in what they save on the validation split."""
        saved = Spacing(self.traces.validation, self.subject.loaded.geometry)
        return emad_margins(self.traces.profile, saved, SETTINGS)

    @cached_property
    def selected(self) -> Loss | None:
        """The cheapest margin whose validation drop is within bounds; None if no margin's is."""
        geometry, validation = self.subject.loaded.geometry, self.traces.validation
        table = loss_table(validation, geometry, self.margins)
        (reference,) = loss_table(validation, geometry, [self.subject.full])
        accuracy_drop = self.scored.validation_drop if self.scored.validated else None
        return cheapest_within_bounds(table, reference.perplexity, accuracy_drop)

    @cached_property
    def put_forward(self) -> list[OperatingPoint]:
        """Calibrated default, margin chosen on validation, the margin the user named."""
        named, profile = self.subject.study.margin, self.traces.profile
        margins = [0.0] if named is None else [0.0, named]
        if self.selected is not None and self.selected.point.margin_nats is not None:
            margins.append(self.selected.point.margin_nats)
        points = [profile.point(margin) for margin in margins]
        return list({point.name: point for point in points}.values())

    @cached_property
    def losses(self) -> list[Loss]:
        """Evaluation losses of the points put forward."""
        return loss_table(self.traces.evaluation, self.subject.loaded.geometry, self.put_forward)

    @cached_property
    def full_loss(self) -> Loss:
        (reference,) = loss_table(self.traces.evaluation, self.subject.loaded.geometry, [self.subject.full])
        return reference

    @cached_property
    def emad_sweep(self) -> list[Loss]:
        """Evaluation losses of EMAD at every margin of the grid."""
        return loss_table(self.traces.evaluation, self.subject.loaded.geometry, self.margins)

    @cached_property
    def truncation_sweep(self) -> list[Loss]:
        """Evaluation losses of fixed truncation at every depth."""
        depths = truncations(self.subject.stepper.layers)
        return loss_table(self.traces.evaluation, self.subject.loaded.geometry, depths)

    def nll(self, loss: Loss) -> NllPair:
        """NLL sums of ``loss`` and of full depth, and tokens, by evaluated document."""
        mine, full = (self.traces.by_document(each.nll_nats) for each in (loss, self.full_loss))
        return mine, full, self.traces.lengths

    def at(self, loss: Loss, tasks: Sequence[str] | None = None) -> PointEvidence:
        """What F1 judges at a point: perplexity per document and answers per item, against full depth."""
        chosen, scored = self.scored.tasks if tasks is None else tasks, self.scored
        return PointEvidence(
            loss.point.name,
            loss.net_reduction,
            {self.subject.corpus: self.nll(loss)},
            {task: (scored.correct(task, self.subject.full), scored.correct(task, loss.point)) for task in chosen},
            {task: scored.chance(task) for task in chosen},
        )
