"""One decoding step at adaptive depth (EMAD, "Algorithm (per token)").

    for each new token:  hidden = embed(token)
      for segment (i, j] between layers where a row may stop:
         hidden = run(hidden, i, j)
         at a probe: read the signal Ĥ_j of the rows still running; rows whose rule fires stop
         rows whose cap is j stop
      emit from the head at D_t

Symbols: ``depth`` is D_t, ``cap`` is D_{t-1} or what else the schedule allows, ``signal`` is Ĥ. A row that stops leaves
the batch for the layers above; what the cache is owed there is settled by its schedule's flow (``schedule.flow``):
nothing under a schedule that never rises.

The readout at a full-softmax probe doubles as the output distribution of a row that stops there: it is never computed
twice. Any other estimator reads first and pays a full head at the exit.
This module knows no prompts, no sampling and no clock. It counts what it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.models.stepper import Frame, Stepper
from emad_ref.point import OperatingPoint
from emad_ref.policy.bins import bin_index
from emad_ref.policy.thresholds import fires, planned_exits
from emad_ref.protocol import Step
from emad_ref.readout.signals import on_host
from emad_ref.readout.states import translators_of
from emad_ref.readout.watch import watch_of
from emad_ref.record import Bools, Floats, Ints
from emad_ref.schedule.flow import Start, Store, rows_of
from emad_ref.schedule.table import schedule_of


@dataclass(frozen=True, eq=False)  # holds what changes from step to step: a feed is itself, not its values
class Feed:
    """What one step processes, what it meets, and what each of its rows may do.

    ``tokens`` int64 [rows, n] on the device; ``frame`` theirs; ``store`` what the session keeps between steps.
    ``cap`` int64 [rows]: the largest depth each row may take. ``asked`` bool [rows]: the rule is asked about the row;
    else it takes its cap, and no probe is read.
    ``decided`` int64 [rows]: index of each row's first token among its decided ones, for thresholds that decay.
    ``last``: tokens at the end of each row whose logits are wanted, 0…n; of the others only probes are read.
    """

    tokens: Tensor
    frame: Frame
    store: Store
    cap: Ints
    asked: Bools
    decided: Ints
    last: int


@dataclass(frozen=True, eq=False)  # holds arrays: an arrival is itself, not its values
class Arrival:
    """Where the tokens of one feed came to, still on the device: what every way of running them gives.

    ``logits`` [rows, last, V], each at its token's depth; ``depth`` int64 [rows, n]; ``signal`` float64 [rows, n, P] as
    compared, NaN unread. ``cap`` int64 [rows]: the largest depth each row's first token was allowed.
    """

    logits: Tensor
    depth: Ints
    signal: Floats
    cap: Ints

    def step(self) -> Step:
        """The protocol's view, in NumPy."""
        return Step(on_host(self.logits), self.depth, self.signal)


def joined(arrivals: Sequence[Arrival]) -> Arrival:
    """Feeds of the same rows, one after the other, as one."""
    logits = torch.cat([one.logits for one in arrivals], dim=1)
    depth, signal = (np.concatenate([getattr(one, name) for one in arrivals], axis=1) for name in ("depth", "signal"))
    return Arrival(logits, depth, signal, arrivals[0].cap)


_NONE = np.empty(0, dtype=np.int64)


class _Running(NamedTuple):
    """Batch rows of a step that have not stopped, at least one, each [running]: ``rows`` their numbers, what they may
    take, and whether the rule is asked about them; the lowest cap, and whether it is asked about any.

    Made anew where rows stop, not at every probe: on a few rows NumPy takes longer to be asked than to answer.
    """

    rows: Ints
    caps: Ints
    asked: Bools
    lowest: int
    any_asked: bool

    @staticmethod
    def of(rows: Ints, cap: Ints, asked: Bools) -> _Running:
        caps, mine = cap[rows], asked[rows]
        return _Running(rows, caps, mine, int(caps.min()), bool(mine.any()))


class Walker:
    """Takes feeds up the layers: everything a step needs that does not change from token to token."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        self.stepper, self.point, self.schedule = stepper, point, schedule_of(point)
        self.watch, self.translators = watch_of(stepper, point), translators_of(stepper, point)
        self.column = {probe: i for i, probe in enumerate(point.probes)}

    def walk(self, feed: Feed) -> Arrival:
        """Process one token per row at depths of the rule's choosing; several where no row is asked about."""
        depth_of_all = self._told(feed)
        return self._ask(feed) if depth_of_all is None else self._straight(feed, depth_of_all)

    def _told(self, feed: Feed) -> int | None:
        """The depth of all rows where no probe can be read on the way to it; None where a row is to be asked."""
        cap = feed.cap.tolist()
        if cap.count(cap[0]) != len(cap):
            return None
        probes = self.point.probes
        return cap[0] if not probes or probes[0] > cap[0] or not feed.asked.any() else None

    def _straight(self, feed: Feed, depth: int) -> Arrival:
        """All rows up to ``depth``, where they stop."""
        rows, queries = feed.tokens.shape
        hidden = self.stepper.embed(feed.tokens, feed.frame)
        flow = self.schedule.flow(Start(feed.store, self.point.ceiling, hidden, feed.frame, self.translators))
        self.watch.begin()
        logits = self.watch.emit(flow.run(0, depth)[:, queries - feed.last :], depth, feed.store.work)
        flow.stop(np.arange(rows), _NONE, depth)
        flow.finish()
        signal = np.full((rows, queries, len(self.column)), np.nan)
        return Arrival(logits, np.full((rows, queries), depth, dtype=np.int64), signal, feed.cap)

    def _ask(self, feed: Feed) -> Arrival:
        """Row by row as the rule decides, from halt to halt."""
        (rows, queries), last, work = feed.tokens.shape, feed.last, feed.store.work
        cap, depth = feed.cap.copy(), np.zeros((rows, queries), dtype=np.int64)
        readings: list[tuple[Ints, int, Floats]] = []  # rows, probe, what it read there
        before: Floats = np.empty(0)  # what the probe before read, of the running rows
        logits: Tensor | None = None
        running, at = _Running.of(np.arange(rows), cap, feed.asked), 0
        bins: NDArray[np.intp] | None = None
        hidden = self.stepper.embed(feed.tokens, feed.frame)
        flow = self.schedule.flow(Start(feed.store, self.point.ceiling, hidden, feed.frame, self.translators))
        self.watch.begin()
        while True:
            layer = self._next_halt(at, running)
            hidden = flow.run(at, layer)  # [running, n, D]
            at = layer
            stops = running.caps == layer if layer == running.lowest else None  # None: of no row
            seen: Tensor | None = None
            probe = self.column.get(layer) if running.any_asked else None
            if probe is not None:
                read = self.watch.see(hidden[:, -1], probe, work)
                values = on_host(read.signal)
                readings.append((running.rows, probe, values))
                if probe == 0:
                    bins = self._bins(feed.frame, running.rows, read.logits)
                here = None if bins is None else bins[running.rows]
                decided = None if self.point.decay is None else feed.decided[running.rows]
                fired = fires(self.point, probe, values.astype(np.float32), here, decided)
                fired &= running.asked
                stops = fired if stops is None else stops | fired
                if self.point.interpolate:
                    self._plan(cap, running, probe, before, values, here)
                    before, running = values, _Running.of(running.rows, cap, feed.asked)
                seen = None if read.logits is None else read.logits[:, None]
            if stops is None or not stops.any():
                continue
            stopped, going = np.flatnonzero(stops), np.flatnonzero(~stops)
            if seen is None:
                z = self.watch.emit(rows_of(hidden, stopped)[:, queries - last :], layer, work)
            else:
                z = rows_of(seen, stopped)[:, 1 - last :]
            gone = running.rows[stopped]
            depth[gone] = layer
            if len(z) == rows:
                logits = z
            else:
                logits = z.new_empty(rows, last, z.shape[-1]) if logits is None else logits
                logits[torch.from_numpy(gone).to(z.device)] = z
            flow.stop(stopped, going, layer)
            if not len(going):
                break
            running = _Running.of(running.rows[going], cap, feed.asked)
            before = before[going] if self.point.interpolate and readings else before
            self.watch.keep(torch.from_numpy(going).to(hidden.device))
        flow.finish()
        signal = np.full((rows, queries, len(self.column)), np.nan)
        for of, probe, values in readings:
            signal[of, -1, probe] = values  # a probe reads the row's last token, the only one where it is asked
        return Arrival(logits, depth, signal, feed.cap)

    def _next_halt(self, at: int, running: _Running) -> int:
        """The next layer after which some running row may stop: its cap, or a probe where one is asked."""
        if running.any_asked:
            for probe in self.point.probes:
                if probe > at:
                    return min(probe, running.lowest)
        return running.lowest

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
        self, cap: Ints, running: _Running, probe: int, before: Floats, here: Floats, bins: NDArray[np.intp] | None
    ) -> None:
        """Lower the caps of rows that are to leave before the next probe, by what was read ``before`` and ``here``."""
        if probe == 0:
            return
        planned = planned_exits(self.point, probe, before.astype(np.float32), here.astype(np.float32), bins)
        chosen = running.asked & (planned > 0)
        cap[running.rows[chosen]] = np.minimum(running.caps[chosen], planned[chosen])
