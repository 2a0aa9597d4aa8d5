"""One decoding step at adaptive depth (EMAD, "Algorithm (per token)").

    for each new token:  hidden = embed(token)
      for segment (i, j] between layers where a row may stop:
         hidden = run(hidden, i, j)
         at a probe: read the signal Ĥ_j of the rows still running; rows whose rule fires stop
         rows whose cap is j stop
      emit from the head at D_t

Symbols: ``depth`` is D_t, ``cap`` is D_{t-1} or whatever the schedule admits, ``signal`` is Ĥ. A row that stops leaves
the batch for the layers above. The schedule's flow (``schedule.interface``) settles the K/V that the cache still needs
there; a schedule that never rises needs none.

A full-softmax probe doubles as the output distribution of a row that stops there, so it is computed once. Any other
estimator reads first and pays a full head at the exit. Under the monotone schedule ``run_chunk`` decides several
tokens
in one pass: the tokens still running after a layer are a prefix of the chunk. Both count the work that they execute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.exit_rules.bins import bin_index
from emad_ref.exit_rules.rules import fires, planned_exits
from emad_ref.models.stepper import ForwardContext, Stepper
from emad_ref.point import OperatingPoint
from emad_ref.probes.lens import point_translators
from emad_ref.probes.probe import make_probe
from emad_ref.probes.signal_values import to_host
from emad_ref.protocol import Step
from emad_ref.record import Bools, Floats, Ints
from emad_ref.schedule.interface import FlowStart, SessionState, count_blocks, rows_of
from emad_ref.schedule.schedules import schedule_of
from emad_ref.signals import PREVIOUS_PROBE, SIGNALS


@dataclass(frozen=True, eq=False)  # holds what changes from step to step: a feed is itself, not its values
class StepInput:
    """What one step processes, what it meets, and what each of its rows may do.

    ``tokens`` int64 [rows, n] on the device; ``frame`` theirs; ``store`` what the session keeps between steps.
    ``cap`` int64 [rows]: the largest depth each row may take. ``asked`` bool [rows]: the rule is asked about the row;
    else it takes its cap, and no probe is read.
    ``decided`` int64 [rows]: index of each row's first token among its decided ones, for thresholds that decay.
    ``last``: tokens at the end of each row whose logits are wanted, 0…n; of the others only probes are read.
    """

    tokens: Tensor
    frame: ForwardContext
    store: SessionState
    cap: Ints
    asked: Bools
    decided: Ints
    last: int


@dataclass(frozen=True, eq=False)  # holds arrays: an arrival is itself, not its values
class StepOutput:
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
        return Step(to_host(self.logits), self.depth, self.signal)


def concatenate_steps(arrivals: Sequence[StepOutput]) -> StepOutput:
    """Feeds of the same rows, one after the other, as one."""
    logits = torch.cat([one.logits for one in arrivals], dim=1)
    depth, signal = (np.concatenate([getattr(one, name) for one in arrivals], axis=1) for name in ("depth", "signal"))
    return StepOutput(logits, depth, signal, arrivals[0].cap)


_NO_ROWS = np.empty(0, dtype=np.int64)


class _RunningRows(NamedTuple):
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
    def of(rows: Ints, cap: Ints, asked: Bools) -> _RunningRows:
        caps, mine = cap[rows], asked[rows]
        return _RunningRows(rows, caps, mine, int(caps.min()), bool(mine.any()))


class AdaptiveForward:
    """Takes feeds up the layers: everything a step needs that does not change from token to token."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        self.stepper, self.point, self.schedule = stepper, point, schedule_of(point)
        self.watch, self.translators = make_probe(stepper, point), point_translators(stepper, point)
        self.column = {probe: i for i, probe in enumerate(point.probes)}

    def walk(self, feed: StepInput) -> StepOutput:
        """Process one token per row at depths of the rule's choosing; several where no row is asked about."""
        depth_of_all = self._told(feed)
        return self._ask(feed) if depth_of_all is None else self._straight(feed, depth_of_all)

    def _told(self, feed: StepInput) -> int | None:
        """The depth of all rows where no probe can be read on the way to it; None where a row is to be asked."""
        cap = feed.cap.tolist()
        if cap.count(cap[0]) != len(cap):
            return None
        probes = self.point.probes
        return cap[0] if not probes or probes[0] > cap[0] or not feed.asked.any() else None

    def _straight(self, feed: StepInput, depth: int) -> StepOutput:
        """All rows up to ``depth``, where they stop."""
        rows, queries = feed.tokens.shape
        hidden = self.stepper.embed(feed.tokens, feed.frame)
        flow = self.schedule.flow(FlowStart(feed.store, self.point.ceiling, hidden, feed.frame, self.translators))
        self.watch.begin()
        logits = self.watch.emit(flow.run(0, depth)[:, queries - feed.last :], depth, feed.store.work)
        flow.stop(np.arange(rows), _NO_ROWS, depth)
        flow.finish()
        signal = np.full((rows, queries, len(self.column)), np.nan)
        return StepOutput(logits, np.full((rows, queries), depth, dtype=np.int64), signal, feed.cap)

    def _ask(self, feed: StepInput) -> StepOutput:
        """Row by row as the rule decides, from halt to halt."""
        (rows, queries), last, work = feed.tokens.shape, feed.last, feed.store.work
        cap, depth = feed.cap.copy(), np.zeros((rows, queries), dtype=np.int64)
        readings: list[tuple[Ints, int, Floats]] = []  # rows, probe, what it read there
        before: Floats = np.empty(0)  # what the probe before read, of the running rows
        logits: Tensor | None = None
        running, at = _RunningRows.of(np.arange(rows), cap, feed.asked), 0
        bins: NDArray[np.intp] | None = None
        hidden = self.stepper.embed(feed.tokens, feed.frame)
        flow = self.schedule.flow(FlowStart(feed.store, self.point.ceiling, hidden, feed.frame, self.translators))
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
                values = to_host(read.signal)
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
                    before, running = values, _RunningRows.of(running.rows, cap, feed.asked)
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
            running = _RunningRows.of(running.rows[going], cap, feed.asked)
            before = before[going] if self.point.interpolate and readings else before
            self.watch.keep(torch.from_numpy(going).to(hidden.device))
        flow.finish()
        signal = np.full((rows, queries, len(self.column)), np.nan)
        for of, probe, values in readings:
            signal[of, -1, probe] = values  # a probe reads the row's last token, the only one where it is asked
        return StepOutput(logits, depth, signal, feed.cap)

    def _next_halt(self, at: int, running: _RunningRows) -> int:
        """The next layer after which some running row may stop: its cap, or a probe where one is asked."""
        if running.any_asked:
            for probe in self.point.probes:
                if probe > at:
                    return min(probe, running.lowest)
        return running.lowest

    def _bins(self, frame: ForwardContext, running: Ints, logits: Tensor | None) -> NDArray[np.intp] | None:
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
        self, cap: Ints, running: _RunningRows, probe: int, before: Floats, here: Floats, bins: NDArray[np.intp] | None
    ) -> None:
        """Lower the caps of rows that are to leave before the next probe, by what was read ``before`` and ``here``."""
        if probe == 0:
            return
        planned = planned_exits(self.point, probe, before.astype(np.float32), here.astype(np.float32), bins)
        chosen = running.asked & (planned > 0)
        cap[running.rows[chosen]] = np.minimum(running.caps[chosen], planned[chosen])


def has_chunk_rule(point: OperatingPoint) -> bool:
    """Whether a chunk's depths can be read off in one pass: by prefix, with one bin, and exits at probes only.

    Not where a watch remembers shallower layers, of rows that a chunk would drop behind its back, nor where thresholds
    fall with the decided tokens.
    """
    whole = point.bins.count == 1 and not point.interpolate and point.estimator.kind == "full"
    forgets = point.confidence is None and point.decay is None and SIGNALS[point.signal].needs is not PREVIOUS_PROBE
    return whole and forgets and schedule_of(point).by_prefix


def run_chunk(walker: AdaptiveForward, feed: StepInput) -> StepOutput:
    """Process several tokens per row, from each row's cap down; the rule is asked about all of them."""
    stepper, point, watch, column = walker.stepper, walker.point, walker.watch, walker.column
    frame, cap, last, cache, work = feed.frame, feed.cap, feed.last, feed.store.cache, feed.store.work
    rows, queries = feed.tokens.shape
    depth = np.zeros((rows, queries), dtype=np.int64)
    signal = np.full((rows, queries, len(point.probes)), np.nan)
    left = np.full(rows, queries)  # length of each row's running prefix
    running = np.arange(rows)
    positions = np.array(frame.starts)[:, None] + np.arange(queries)
    hidden, at, logits = stepper.embed(feed.tokens, frame), 0, None
    watch.begin()
    while len(running):
        lowest = int(cap[running].min())
        layer = min([lowest, *(probe for probe in column if at < probe < lowest)])
        hidden = stepper.run(hidden, at, layer, frame, cache)
        count_blocks(work, at, layer, hidden.shape[0], hidden.shape[1], frame.executed)
        at, keep = layer, left[running].copy()
        inside = np.arange(hidden.shape[1]) < keep[:, None]  # [running, width] not padding
        if layer in column:
            read = watch.see(hidden[torch.from_numpy(inside).to(hidden.device)], column[layer], work)
            values = np.full(inside.shape, np.nan)
            values[inside] = to_host(read.signal)
            signal[running[:, None], np.arange(inside.shape[1]), column[layer]] = values
            fired = fires(point, column[layer], values.astype(np.float32)) & inside
            keep = np.where(fired.any(axis=1), fired.argmax(axis=1), keep)
        keep = np.where(cap[running] == layer, 0, keep)
        stopped = inside & (np.arange(inside.shape[1]) >= keep[:, None])
        if not stopped.any():
            continue
        shown = stopped & (np.arange(inside.shape[1]) >= queries - last)
        if layer in column:
            assert read.logits is not None, "a full probe is the output distribution"
            z = read.logits[torch.from_numpy(shown[inside]).to(hidden.device)]
        else:
            z = watch.emit(hidden[torch.from_numpy(shown).to(hidden.device)], layer, work)
        if logits is None:
            logits = z.new_empty(rows, last, z.shape[-1])
        which, place = np.nonzero(shown)
        logits[torch.from_numpy(running[which]), torch.from_numpy(place - (queries - last))] = z
        which, place = np.nonzero(stopped)
        depth[running[which], place] = layer
        left[running] = keep
        going = np.flatnonzero(keep > 0)
        running = running[going]
        if len(running):
            widest = int(left[running].max())
            hidden = hidden[torch.from_numpy(going).to(hidden.device), :widest]
            frame = stepper.frame(positions[running, :widest], cache, rows=running, lengths=left[running])
    assert logits is not None, "every token stops at its cap at the latest"
    return StepOutput(logits, depth, signal, cap)
