"""What a decoding step reads at a probe: a signal per row, and the distribution to emit from if the row stops there.

A watch belongs to one operating point. ``see`` reads the states after a probe layer and charges what it ran to the
ledger; ``emit`` is the readout of rows that stop where nothing was read that they could emit from. A watch may remember
what it saw at shallower probes of the same step: ``begin`` forgets it, ``keep`` drops the rows that stopped.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.readout.confidence import HeadWatch, confidence_watch, require_aligned
from emad_ref.readout.estimate import Reader, reader_of
from emad_ref.readout.signals import Seen, require_finite, shown
from emad_ref.record import READOUTS, Work
from emad_ref.signals import PREVIOUS, SIGNALS, Readout


class Watch(Protocol):
    def begin(self) -> None:
        """A new step: forget what shallower probes showed."""

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        """Read states [rows, D] after ``point.probes[probe]``. Raises NotFinite."""

    def keep(self, rows: Tensor) -> None:
        """Only these rows (int64 indices into those still running) go on to deeper probes."""

    def emit(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        """Logits [..., V] of states [..., D] that stop after ``layer``."""


class FullWatch(HeadWatch):
    """A full softmax: its logits give any signal of one layer, and are what a row emits from."""

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        layer = self.point.probes[probe]
        logits = self.emit(hidden, layer, work)
        return Seen(shown(SIGNALS[self.point.signal].of(logits), f"after layer {layer}"), logits)


class EstimateWatch(HeadWatch):
    """An estimate of the entropy; the head is run once, where the row stops."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        super().__init__(stepper, point)
        self.reader: Reader = reader_of(stepper, point.estimator, point.probes)
        self.kind = READOUTS.index(self.reader.kind)

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        layer = self.point.probes[probe]
        rows = hidden.shape[0]
        work.readout_rows[self.kind, layer - 1] += rows
        work.readout_macs[self.kind, layer - 1] += rows * self.reader.macs_per_row
        return Seen(shown(self.reader.entropy_nats(hidden, probe), f"after layer {layer}"), None)


class AgreementWatch(HeadWatch):
    """A full softmax that remembers the top-1 token of the probe before, row by row."""

    def begin(self) -> None:
        self.before: Tensor | None = None

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        layer = self.point.probes[probe]
        logits = self.emit(hidden, layer, work)
        log_p, best = (pair[:, 0] for pair in Readout(logits).top2)
        require_finite(log_p, f"after layer {layer}")
        before, self.before = self.before, best
        if before is None:
            return Seen(torch.zeros_like(log_p), logits)
        require_aligned(len(before), len(hidden))
        return Seen(torch.where(best == before, log_p.exp(), 0.0), logits)

    def keep(self, rows: Tensor) -> None:
        self.before = None if self.before is None else self.before[rows]


def watch_of(stepper: Stepper, point: OperatingPoint) -> Watch:
    """The watch that a point asks for."""
    if point.confidence is not None:
        return confidence_watch(stepper, point)
    if SIGNALS[point.signal].needs is PREVIOUS:
        return AgreementWatch(stepper, point)
    return FullWatch(stepper, point) if point.estimator.kind == "full" else EstimateWatch(stepper, point)
