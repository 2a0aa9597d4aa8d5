"""One decoding step at adaptive depth (EMAD, "Algorithm (per token)").

    for each new token:  hidden = embed(token)
      for segment (i, j] between layers where a row may stop:
         hidden = run(hidden, i, j)
         at a probe: read the signal Ĥ_j of the rows still running; rows whose rule fires stop
         rows whose cap is j stop
      emit from the head at D_t

Symbols: ``depth`` is D_t, ``cap`` is D_{t-1} or the schedule's admission, ``signal`` is Ĥ. A row that stops leaves the
batch for the layers above. The schedule's flow (``schedule.schedules``) settles the K/V that the cache still needs
there; a schedule that never rises needs none. A full-softmax probe's logits are also the output of a row that stops
there. After other estimators (``probes.estimators``) a row that stops runs the full head. The step counts the work that
it executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.exit_rules import assign_bins, extrapolate_exits_between_probes, is_exit_rule_met
from emad_ref.models.forward_context import ForwardContext
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.probes.probe import make_probe
from emad_ref.probes.signal_values import to_numpy_float64
from emad_ref.probes.tuned_lens import get_point_translators
from emad_ref.protocol import Step
from emad_ref.record import Bools, Floats, Ints
from emad_ref.schedule.schedules import Flow, FlowInputs, SessionState, get_point_schedule, select_rows
from emad_ref.signals import PREVIOUS_PROBE, SIGNALS


@dataclass(frozen=True, eq=False)
class StepInput:
    """Input of one step: its tokens, and the largest depth of each row.

    ``tokens``   int64 [rows, n] on the device; ``context``: their positions and masks; ``state``: the session's.
    ``cap``      int64 [rows] the largest depth each row may take.
    ``by_rule``  bool [rows] whether the rule may stop the row earlier; else the row takes its cap, and probes read it
                 only beside other rows.
    ``decided``  int64 [rows] index of each row's first token among its decided ones, for thresholds that decay.
    ``last``     number of tokens at the end of each row whose logits are needed, 0…n.
    """

    tokens: Tensor
    context: ForwardContext
    state: SessionState
    cap: Ints
    by_rule: Bools
    decided: Ints
    last: int


@dataclass(frozen=True, eq=False)
class StepOutput:
    """``logits`` [rows, last, V] on the device, each at its token's depth; ``depth`` int64 [rows, n].

    ``signal`` float64 [rows, n, probes] as read, before its rounding to float32; NaN where unread; ``cap`` int64
    [rows] of each row's first token.
    """

    logits: Tensor
    depth: Ints
    signal: Floats
    cap: Ints

    def to_numpy_step(self) -> Step:
        """The protocol's form, in NumPy."""
        return Step(to_numpy_float64(self.logits), self.depth, self.signal)


def concatenate_steps(steps: Sequence[StepOutput]) -> StepOutput:
    """Consecutive steps of the same rows as one."""
    logits = torch.cat([one.logits for one in steps], dim=1)
    depth, signal = (np.concatenate([getattr(one, name) for one in steps], axis=1) for name in ("depth", "signal"))
    return StepOutput(logits, depth, signal, steps[0].cap)


class _RunningRows(NamedTuple):
    """Batch rows that have not stopped, each column [running]; ``lowest`` cap, whether a probe reads any row."""

    rows: Ints
    caps: Ints
    by_rule: Bools
    lowest: int
    any_asked: bool

    @staticmethod
    def of(rows: Ints, cap: Ints, by_rule: Bools) -> _RunningRows:
        caps, mine = cap[rows], by_rule[rows]
        return _RunningRows(rows, caps, mine, int(caps.min()), bool(mine.any()))


class AdaptiveForward:
    """Adaptive forward passes of one model at one operating point."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        self.stepper, self.point, self.schedule = stepper, point, get_point_schedule(point)
        self.probe, self.translators = make_probe(stepper, point), get_point_translators(stepper, point)
        self.column = {layer: number for number, layer in enumerate(point.probes)}

    @property
    def can_decide_chunks(self) -> bool:
        """Whether one pass decides several tokens.

        False if depth is not by prefix, if thresholds depend on bins, decay or interpolation, for estimates of the
        entropy, and if a probe remembers shallower layers of rows that stop.
        """
        point = self.point
        several = (
            self.schedule.by_prefix and point.bins.bin_count == 1 and not point.interpolate and point.decay is None
        )
        remembers = point.confidence is not None or SIGNALS[point.signal].needs is PREVIOUS_PROBE
        return several and point.estimator.kind == "full" and not remembers

    def run_step(self, step: StepInput) -> StepOutput:
        """Process the tokens of ``step``: one per row; any number if the rule reads none, or ``can_decide_chunks``."""
        caps, probes = step.cap.tolist(), self.point.probes
        unread = not probes or probes[0] > caps[0] or not step.by_rule.any()
        if unread and caps.count(caps[0]) == len(caps):
            return self._run_to(step, caps[0])
        chunk = step.tokens.shape[1] > 1 and step.by_rule.any()
        return self._run_chunk(step) if chunk else self._run_adaptive(step)

    def _run_to(self, step: StepInput, depth: int) -> StepOutput:
        """Run every row to ``depth``."""
        (rows, queries), flow = step.tokens.shape, self._start(step)
        logits = self.probe.emit_logits(flow.run_layers(0, depth)[:, queries - step.last :], depth, step.state.work)
        flow.stop_rows(np.arange(rows), np.empty(0, dtype=np.int64), depth)
        flow.finish()
        return StepOutput(logits, np.full((rows, queries), depth), self._unread(step), step.cap)

    def _run_adaptive(self, step: StepInput) -> StepOutput:
        """Run each row until its rule fires or its cap is reached."""
        (rows, queries), last, work = step.tokens.shape, step.last, step.state.work
        cap, depth, signal = step.cap.copy(), np.zeros((rows, queries), dtype=np.int64), self._unread(step)
        logits: Tensor | None = None
        bins: NDArray[np.intp] | None = None
        before: Floats | None = None  # the previous probe's signal of the running rows
        running, layer, flow = _RunningRows.of(np.arange(rows), cap, step.by_rule), 0, self._start(step)
        while True:
            below, layer = layer, self._next_exit(layer, running)
            hidden = flow.run_layers(below, layer)  # [running, n, D]
            stops, shown_logits = running.caps == layer, None
            column = self.column.get(layer) if running.any_asked else None
            if column is not None:
                reading = self.probe.read(hidden[:, -1], column, work)
                values = to_numpy_float64(reading.signal)
                signal[running.rows, -1, column] = values
                if column == 0:
                    bins = self._bins(step.context, running.rows, reading.logits)
                here = None if bins is None else bins[running.rows]
                decided = None if self.point.decay is None else step.decided[running.rows]
                stops |= is_exit_rule_met(self.point, column, values, here, decided) & running.by_rule
                if self.point.interpolate:
                    if before is not None:
                        self._plan_exits(cap, running, column, before, values, here)
                    before, running = values, _RunningRows.of(running.rows, cap, step.by_rule)
                shown_logits = None if reading.logits is None else reading.logits[:, None]
            if not stops.any():
                continue
            stopped, going = np.flatnonzero(stops), np.flatnonzero(~stops)
            if shown_logits is None:
                emitted = self.probe.emit_logits(select_rows(hidden, stopped)[:, queries - last :], layer, work)
            else:
                emitted = select_rows(shown_logits, stopped)[:, 1 - last :]  # of one token; ``last`` is 0 or 1
            depth[running.rows[stopped]] = layer
            logits = _place(emitted, running.rows[stopped], rows, logits)
            flow.stop_rows(stopped, going, layer)
            if not len(going):
                break
            running = _RunningRows.of(running.rows[going], cap, step.by_rule)
            before = None if before is None else before[going]
            self.probe.keep_running_rows(torch.from_numpy(going).to(hidden.device))
        flow.finish()
        assert logits is not None, "every row stops at its cap at the latest"
        return StepOutput(logits, depth, signal, step.cap)

    def _run_chunk(self, step: StepInput) -> StepOutput:
        """Run several tokens per row in one pass, under the monotone rule D_t ≤ D_{t−1}.

        The running tokens of a row after layer ℓ are a prefix of the chunk. At a probe the first token of the prefix
        whose rule fires stops, with all tokens behind it; at the row's cap the rest stops. Prefixes are padded on the
        right to the longest. Padding is executed, so it is counted.
        """
        stepper, cap, last, cache, work = self.stepper, step.cap, step.last, step.state.cache, step.state.work
        (rows, queries), context, logits = step.tokens.shape, step.context, None
        depth, signal = np.zeros((rows, queries), dtype=np.int64), self._unread(step)
        positions = np.array(context.starts)[:, None] + np.arange(queries)
        running, length, layer = np.arange(rows), np.full(rows, queries), 0  # length of each row's running prefix
        hidden = stepper.embed(step.tokens, context)
        self.probe.begin_step()
        while len(running):
            lowest = int(cap[running].min())
            below, layer = layer, min([lowest, *(probe for probe in self.column if layer < probe < lowest)])
            hidden = stepper.run_layers(hidden, below, layer, context, cache)
            width = hidden.shape[1]
            work.count_blocks(below, layer, len(running), width, context.executed)
            keep, place = length[running].copy(), np.arange(width)
            inside = place < keep[:, None]  # [running, width] without padding
            reading, column = None, self.column.get(layer)
            if column is not None:
                reading = self.probe.read(hidden[torch.from_numpy(inside).to(hidden.device)], column, work)
                values = np.full(inside.shape, np.nan)
                values[inside] = to_numpy_float64(reading.signal)
                signal[running[:, None], place, column] = values
                fired = is_exit_rule_met(self.point, column, values) & inside
                keep = np.where(fired.any(axis=1), fired.argmax(axis=1), keep)
            keep = np.where(cap[running] == layer, 0, keep)
            stopped = inside & (place >= keep[:, None])
            if not stopped.any():
                continue
            emitting = stopped & (place >= queries - last)
            if reading is not None and reading.logits is not None:
                emitted = reading.logits[torch.from_numpy(emitting[inside]).to(hidden.device)]
            else:
                emitted = self.probe.emit_logits(hidden[torch.from_numpy(emitting).to(hidden.device)], layer, work)
            logits = emitted.new_empty(rows, last, emitted.shape[-1]) if logits is None else logits
            which, where = np.nonzero(emitting)
            logits[torch.from_numpy(running[which]), torch.from_numpy(where - (queries - last))] = emitted
            which, where = np.nonzero(stopped)
            depth[running[which], where] = layer
            length[running] = keep
            going = np.flatnonzero(keep > 0)
            running = running[going]
            if len(running):
                widest = int(length[running].max())
                hidden = hidden[torch.from_numpy(going).to(hidden.device), :widest]
                context = stepper.prepare_forward(
                    positions[running, :widest], cache, rows=running, lengths=length[running]
                )
        assert logits is not None, "every token stops at its cap at the latest"
        return StepOutput(logits, depth, signal, cap)

    # ------------------------------------------------------------ parts of a step

    def _start(self, step: StepInput) -> Flow:
        """Embed the rows into the schedule's flow; the probe forgets the previous step."""
        self.probe.begin_step()
        hidden = self.stepper.embed(step.tokens, step.context)
        return self.schedule.flow(FlowInputs(step.state, self.point.ceiling, hidden, step.context, self.translators))

    def _unread(self, step: StepInput) -> Floats:
        return np.full((*step.tokens.shape, len(self.column)), np.nan)

    def _next_exit(self, layer: int, running: _RunningRows) -> int:
        """The next layer after which a running row may stop: a probe if the rule reads, else the lowest cap."""
        probes = self.point.probes if running.any_asked else ()
        return next((min(probe, running.lowest) for probe in probes if probe > layer), running.lowest)

    def _bins(self, context: ForwardContext, rows: Ints, logits: Tensor | None) -> NDArray[np.intp] | None:
        """Bin of each batch row at the first probe, 0 for a stopped row; None if there is one bin.

        ``logits`` [running, V]; a point without them refuses features that need them.
        """
        spec = self.point.bins
        if spec.bin_count == 1:
            return None
        position = (np.array(context.starts) + context.queries)[rows]
        confidence, top1 = np.zeros(len(rows), dtype=np.float32), np.zeros(len(rows), dtype=np.int64)
        if logits is not None:
            best = torch.log_softmax(logits.float(), dim=-1).max(dim=-1)
            confidence, top1 = best.values.exp().cpu().numpy(), best.indices.cpu().numpy()
        bins = np.zeros(len(context.starts), dtype=np.intp)
        bins[rows] = assign_bins(spec, position, confidence, top1)
        return bins

    def _plan_exits(
        self,
        cap: Ints,
        running: _RunningRows,
        column: int,
        before: Floats,
        here: Floats,
        bins: NDArray[np.intp] | None,
    ) -> None:
        """Lower the caps of rows whose line through the last two readings crosses τ before the next probe."""
        planned = extrapolate_exits_between_probes(self.point, column, before, here, bins)
        chosen = running.by_rule & (planned > 0)
        cap[running.rows[chosen]] = np.minimum(running.caps[chosen], planned[chosen])


def _place(emitted: Tensor, at: Ints, rows: int, logits: Tensor | None) -> Tensor:
    """``logits`` [rows, n, V] with ``emitted`` in the rows ``at``; allocated here if there are none yet."""
    if len(emitted) == rows:
        return emitted
    if logits is None:
        logits = emitted.new_empty(rows, *emitted.shape[1:])
    logits[torch.from_numpy(at).to(emitted.device)] = emitted
    return logits
