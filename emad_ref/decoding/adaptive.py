"""One decoding step at adaptive depth (EMAD, "Algorithm (per token)").

    for each new token:  hidden = embed(token)
      for segment (i, j] between layers where a row may stop:
         hidden = run(hidden, i, j)
         at a probe: read the signal Ĥ_j of the rows still running; rows whose rule fires stop
         rows whose cap is j stop
      emit from the head at D_t

Symbols: ``depth`` is D_t, ``cap`` is D_{t-1} or what else the schedule allows, ``signal`` is Ĥ. A row that stops leaves
the batch for the layers above; what the cache is owed there is settled by ``decoding.repair``: nothing under a schedule
that never rises.

The readout at a full-softmax probe doubles as the output distribution of a row that stops there: it is never computed
twice. Any other estimator reads first and pays a full head at the exit.
This module knows no prompts, no sampling and no clock. It counts what it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.decoding.repair import Owed, flow_of
from emad_ref.models.cache import Cache
from emad_ref.models.stepper import Frame, Stepper
from emad_ref.point import OperatingPoint
from emad_ref.policy.bins import bin_index
from emad_ref.policy.thresholds import fires, planned_exits
from emad_ref.readout.watch import watch_of
from emad_ref.record import Bools, Floats, Ints, Work


@dataclass(frozen=True)
class Outcome:
    """``logits`` [rows, last, V] on the device; ``depth`` int64 [rows]; ``signal`` float64 [rows, probes], NaN unread.

    ``last``: tokens at the end of each row whose logits were asked for. ``cap`` int64 [rows]: the largest depth each
    row was allowed.
    """

    logits: Tensor
    depth: Ints
    signal: Floats
    cap: Ints


class Step:
    """Everything a step needs that does not change from token to token."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        self.stepper, self.point = stepper, point
        self.watch = watch_of(stepper, point)
        self.column = {probe: i for i, probe in enumerate(point.probes)}

    def decide(
        self,
        tokens: Tensor,
        frame: Frame,
        cache: Cache,
        cap: Ints,
        work: Work,
        owed: Owed,
        held: Bools | None = None,
        decided: Ints | None = None,
        last: int = 1,
    ) -> Outcome:
        """Process one token per row, int64 [rows, 1]; the rule chooses depths up to ``cap`` [rows].

        ``owed``: what earlier tokens of the session left undone. ``held`` [rows]: rows that take their cap unasked.
        ``decided`` [rows]: index of each token among the decided ones of its row, for thresholds that decay.
        ``last`` 0: nobody asks for the logits; only probes read.
        """
        asked = np.ones(len(cap), dtype=bool) if held is None else ~held
        return self._run(tokens, frame, cache, cap, work, owed, asked, last, decided)

    def obey(
        self, tokens: Tensor, frame: Frame, cache: Cache, depth: Ints, work: Work, owed: Owed, last: int
    ) -> Outcome:
        """Process ``tokens`` int64 [rows, n] at the given ``depth`` [rows]; read the ``last`` of them and no probe."""
        return self._run(tokens, frame, cache, depth, work, owed, np.zeros(len(depth), dtype=bool), last)

    def _run(
        self,
        tokens: Tensor,
        frame: Frame,
        cache: Cache,
        cap: Ints,
        work: Work,
        owed: Owed,
        asked: Bools,
        last: int,
        decided: Ints | None = None,
    ) -> Outcome:
        rows, queries = tokens.shape
        allowed, cap, depth = cap, cap.copy(), np.zeros(rows, dtype=np.int64)
        signal = np.full((rows, len(self.column)), np.nan)
        logits: Tensor | None = None
        running, at = np.arange(rows), 0  # batch rows that have not stopped
        bins: NDArray[np.intp] | None = None
        flow = flow_of(self.stepper, self.point, self.stepper.embed(tokens, frame), frame, cache, work, owed)
        self.watch.begin()
        while len(running):
            layer = self._next_halt(at, cap[running], asked[running])
            hidden = flow.run(at, layer)  # [running, n, D]
            at = layer
            stops = cap[running] == layer
            seen: Tensor | None = None
            probe = self.column.get(layer)
            if probe is not None and asked[running].any():
                read = self.watch.see(hidden[:, -1], probe, work)
                values = read.signal.double().cpu().numpy()
                signal[running, probe] = values
                if probe == 0:
                    bins = self._bins(frame, running, read.logits)
                here = None if bins is None else bins[running]
                may = asked[running]
                reached = None if decided is None else decided[running]
                stops = stops | (may & fires(self.point, probe, values.astype(np.float32), here, reached))
                if self.point.interpolate:
                    self._plan(cap, running, probe, signal, here, may)
                seen = None if read.logits is None else read.logits[:, None]
            if not stops.any():
                continue
            stopped, going = np.flatnonzero(stops), np.flatnonzero(~stops)
            if seen is None:
                z = self.watch.emit(_rows(hidden, stopped)[:, queries - last :], layer, work)
            else:
                z = _rows(seen, stopped)[:, 1 - last :]
            depth[running[stopped]] = layer
            if len(z) == rows:
                logits = z
            else:
                logits = z.new_empty(rows, last, z.shape[-1]) if logits is None else logits
                logits[torch.from_numpy(running[stopped]).to(z.device)] = z
            flow.stop(stopped, going, layer)
            running = running[going]
            if len(running):
                self.watch.keep(torch.from_numpy(going).to(hidden.device))
        assert logits is not None, "some row stops at some layer"
        flow.finish()
        return Outcome(logits, depth, signal, allowed)

    def _next_halt(self, at: int, cap: Ints, asked: Bools) -> int:
        """The next layer after which some running row may stop: its cap, or a probe where one is asked."""
        lowest = int(cap.min())
        if asked.any():
            return min([lowest, *(probe for probe in self.column if at < probe < lowest)])
        return lowest

    def _bins(self, frame: Frame, running: Ints, logits: Tensor | None) -> NDArray[np.intp] | None:
        """Bin of each batch row that is running at the first probe, 0 of the others; None where there is one bin.

        ``logits`` [running, V]; without them the point refuses features that would have to know them.
        """
        spec = self.point.bins
        if spec.count == 1:
            return None
        position = (np.array(frame.starts) + frame.queries)[running]
        confidence, top1 = np.zeros(len(running), dtype=np.float32), np.zeros(len(running), dtype=np.int64)
        if logits is not None:
            best = torch.log_softmax(logits.float(), dim=-1).max(dim=-1)
            confidence, top1 = best.values.exp().cpu().numpy(), best.indices.cpu().numpy()
        bins = np.zeros(len(frame.starts), dtype=np.intp)
        bins[running] = bin_index(spec, position, confidence, top1)
        return bins

    def _plan(
        self, cap: Ints, running: Ints, probe: int, signal: Floats, bins: NDArray[np.intp] | None, may: Bools
    ) -> None:
        """Lower the caps of rows that are to leave before the next probe."""
        if probe == 0:
            return
        before, here = (signal[running, i].astype(np.float32) for i in (probe - 1, probe))
        planned = planned_exits(self.point, probe, before, here, bins)
        chosen = may & (planned > 0)
        cap[running[chosen]] = np.minimum(cap[running[chosen]], planned[chosen])


def _rows(tensor: Tensor, rows: Ints) -> Tensor:
    return tensor if len(rows) == len(tensor) else tensor[torch.from_numpy(rows).to(tensor.device)]
