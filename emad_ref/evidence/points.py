"""The operating points that a run puts forward, and what each costs and saves on the evaluation split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from emad_ref.evidence.scored import Scored
from emad_ref.evidence.traces import Traces
from emad_ref.point import OperatingPoint
from emad_ref.sweep.families import SETTINGS
from emad_ref.sweep.grids import emad_margins, truncations
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.sweep.select import cheapest_within_bounds
from emad_ref.verdict.counting import TaskAt
from emad_ref.verdict.units import ByDocument

NllPair = tuple[ByDocument, ByDocument, ByDocument]  # NLL sums at the point and at full depth, tokens


@dataclass(frozen=True)
class PointEvidence:
    """What was measured at one operating point, against full depth on the same documents and items.

    ``net_reduction`` share of decode FLOPs saved, probes and repair charged; ``perplexity`` by corpus, ``tasks`` by
    task name, whether or not they count (``verdict.counting``).
    """

    name: str
    net_reduction: float
    perplexity: Mapping[str, NllPair]
    tasks: Mapping[str, TaskAt] = field(default_factory=dict)


class Points:
    """Taken when first asked for and kept."""

    def __init__(self, traces: Traces, scored: Scored):
        self.traces, self.scored = traces, scored
        self.subject = traces.subject

    @cached_property
    def selected(self) -> Loss | None:
        """The cheapest margin whose validation drop is within bounds; None if no margin's is."""
        geometry, validation = self.subject.loaded.geometry, self.traces.validation
        table = loss_table(validation, geometry, emad_margins(self.traces.profile, SETTINGS))
        (reference,) = loss_table(validation, geometry, [self.subject.full])
        return cheapest_within_bounds(table, reference.perplexity, self.scored.validation_drops)

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
        margins = emad_margins(self.traces.profile, SETTINGS)
        return loss_table(self.traces.evaluation, self.subject.loaded.geometry, margins)

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
        chosen = self.scored.tasks if tasks is None else tasks
        return PointEvidence(
            loss.point.name,
            loss.net_reduction,
            {self.subject.corpus: self.nll(loss)},
            {task: self.scored.at(task, loss.point) for task in chosen},
        )
