"""The operating points that a run puts forward, and what each costs and saves on the evaluation split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from emad_ref.evidence.scored import Scored
from emad_ref.evidence.traces import Traces
from emad_ref.evidence.witnessed import Witnessed
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import apart, spelled
from emad_ref.sweep.families import SETTINGS
from emad_ref.sweep.grids import Spacing, emad_margins, truncations
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.sweep.select import cheapest_within_bounds
from emad_ref.verdict.counting import TaskAt
from emad_ref.verdict.units import ByDocument

NllPair = tuple[ByDocument, ByDocument, ByDocument]  # NLL sums at the point and at full depth, tokens

DEFAULT, NAMED, SELECTED = "calibrated default", "named by the user", "chosen on validation"


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

    def __init__(self, traces: Traces, scored: Scored, witnessed: Witnessed):
        self.traces, self.scored, self.witnessed = traces, scored, witnessed
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
        return cheapest_within_bounds(table, reference.perplexity, self.scored.validation_drops)

    @property
    def put_forward(self) -> list[OperatingPoint]:
        """Calibrated default, the margin the user named, the margin chosen on validation: each once."""
        return list(self.roles)

    @cached_property
    def roles(self) -> dict[OperatingPoint, tuple[str, ...]]:
        """Each point put forward → why it is. Only equal points are one, and no two read alike."""
        named, profile = self.subject.study.margin, self.traces.profile
        margins = {DEFAULT: 0.0} | ({} if named is None else {NAMED: named + 0.0})  # −0.0 + 0.0 is 0.0
        if self.selected is not None and self.selected.point.margin_nats is not None:
            margins[SELECTED] = self.selected.point.margin_nats
        found: dict[OperatingPoint, tuple[str, ...]] = {}
        for (role, margin), text in zip(margins.items(), apart([*margins.values()]), strict=True):
            point = spelled(profile.point(margin), text)
            found[point] = (*found.get(point, ()), role)
        return found

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
        chosen = self.scored.tasks if tasks is None else tasks
        return PointEvidence(
            loss.point.name,
            loss.net_reduction,
            {self.subject.corpus: self.nll(loss)},
            {task: self.scored.at(task, loss.point) for task in chosen},
        )
