"""One decoding step at adaptive depth (EMAD, "Algorithm (per token)").

    h_0 = embed(token t)
    for ℓ in P ∪ {D_{t−1}}, ascending:       the layers where a row may stop
        h_ℓ = run_layers(h, …, ℓ)            each block writes its K and V
        if ℓ in P and Ĥ_ℓ ≤ τ_ℓ: D_t = ℓ     the probe reads Ĥ_ℓ, the rule compares it
        if ℓ = D_{t−1}:          D_t = ℓ     no rule fired
    emit from head(norm(h_{D_t}))

    t, ℓ        a row's token; a layer, counted from 1       h_ℓ     ``hidden`` [running, n, D]
    P           ``point.probes``                             Ĥ_ℓ     ``signal`` [running]
    D_t         ``output.depth`` [rows, n]                   τ_ℓ     ``point.thresholds`` [bins][probes]
    D_{t−1}     ``running.caps`` [running]

Thresholds have m already subtracted. The cap D_{t−1} of a sequence's first token is ``point.ceiling``, L for EMAD
(``schedule.schedules._admit_monotone``).

A step meets three objects: ``RunningRows``, the rows that still run; ``LayerInputs``, what their layers take; and
``StepOutput``, what it emits. A row that stops leaves the batch for the layers above; the schedule's flow
(``schedule.schedules``) writes or defers the K/V that the cache still needs there. A schedule that never rises needs
none. A full-softmax probe's logits are also the output of a row that stops there. After other estimators
(``probes.estimators``) a row that stops runs the full head. The step counts the work that it executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.exit_rules import assign_bins, extrapolate_exits_between_probes, is_exit_rule_met
from emad_ref.models.kv_cache import RunningRows
from emad_ref.models.stepper import LayerInputs, Stepper
from emad_ref.point import OperatingPoint
from emad_ref.probes.probe import make_probe
from emad_ref.probes.tuned_lens import get_point_translators
from emad_ref.protocol import Step
from emad_ref.record import Floats, Ints
from emad_ref.schedule.schedules import Flow, SessionState, get_point_schedule, select_rows
from emad_ref.signals import SIGNALS, to_numpy_float64


@dataclass(frozen=True, eq=False)
class StepInput:
    """Input of one step.

    ``tokens``   int64 [rows, n] on the device, of all rows of the session.
    ``inputs``   rows, positions, masks and K/V of the layers. A row whose ``inputs.running.by_rule`` is False takes its
                 cap; probes read it only beside other rows.
    ``state``    the session's.
    ``decided``  int64 [rows] index of each row's first token among its decided ones, for thresholds that decay.
    ``last``     number of tokens at the end of each row whose logits are needed, 0…n.
    """

    tokens: Tensor
    inputs: LayerInputs
    state: SessionState
    decided: Ints
    last: int


@dataclass(eq=False)
class StepOutput:
    """Output of one step, written as its rows stop.

    ``logits``  [rows, last, V] on the device, each at its token's depth; V is 0 before the first row stops.
    ``depth``   int64 [rows, n]: D_t.
    ``signal``  float64 [rows, n, probes]: Ĥ_ℓ as read, before its rounding to float32; NaN where unread.
    ``cap``     int64 [rows] of each row's first token.
    """

    logits: Tensor
    depth: Ints
    signal: Floats
    cap: Ints

    @staticmethod
    def of_unread_tokens(step: StepInput, probes: int) -> StepOutput:
        """The output of a step of which no layer has run."""
        shape, last = step.tokens.shape, step.last
        depth, signal = np.zeros(shape, dtype=np.int64), np.full((*shape, probes), np.nan)
        return StepOutput(torch.empty(shape[0], last, 0), depth, signal, step.inputs.running.caps)

    def stop_rows(self, row_ids: Ints, layer: int, logits: Tensor) -> None:
        """Rows ``row_ids`` stop after ``layer`` with all their tokens, and emit ``logits`` [stopping, last, V]."""
        self.depth[row_ids] = layer
        if len(row_ids) == len(self.depth):
            self.logits = logits
            return
        self.logits_like(logits)[torch.from_numpy(row_ids).to(logits.device)] = logits

    def logits_like(self, logits: Tensor) -> Tensor:
        """``logits`` [rows, last, V] to write to, allocated like ``logits`` [..., V] at the first call."""
        if self.logits.shape[-1] == 0:
            self.logits = logits.new_empty(*self.logits.shape[:2], logits.shape[-1])
        return self.logits

    def to_numpy_step(self) -> Step:
        """The protocol's form, in NumPy."""
        return Step(to_numpy_float64(self.logits), self.depth, self.signal)


def concatenate_steps(steps: Sequence[StepOutput]) -> StepOutput:
    """Consecutive steps of the same rows as one."""
    logits = torch.cat([one.logits for one in steps], dim=1)
    depth, signal = (np.concatenate([getattr(one, name) for one in steps], axis=1) for name in ("depth", "signal"))
    return StepOutput(logits, depth, signal, steps[0].cap)


NO_ROWS: Ints = np.empty(0, dtype=np.int64)


class AdaptiveForward:
    """Adaptive forward passes of one model at one operating point."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        self.stepper, self.point, self.schedule = stepper, point, get_point_schedule(point)
        self.probe, self.translators = make_probe(stepper, point), get_point_translators(stepper, point)
        self.column = {layer: number for number, layer in enumerate(point.probes)}
        self.has_one_bin = point.bins.bin_count == 1

    @property
    def can_decide_chunks(self) -> bool:
        """Whether one pass decides several tokens.

        True if depth is by prefix, there is one bin, no decay and no interpolation, the probe reads the full head, and
        it remembers no shallower layer.
        """
        point = self.point
        several = (
            self.schedule.by_prefix and point.bins.bin_count == 1 and not point.interpolate and point.decay is None
        )
        remembers = point.confidence is not None or not SIGNALS[point.signal].is_single_layer
        return several and point.estimator.kind == "full" and not remembers

    def run_step(self, step: StepInput) -> StepOutput:
        """Process the tokens of ``step``: one per row; any number if the rule reads none, or ``can_decide_chunks``."""
        running, probes = step.inputs.running, self.point.probes
        caps = running.caps.tolist()
        unread = not probes or probes[0] > caps[0] or not running.reads_rule
        if unread and caps.count(caps[0]) == len(caps):
            return self._run_to(step, caps[0])
        chunk = running.queries > 1 and running.reads_rule
        return self._run_chunk(step) if chunk else self._run_adaptive(step)

    def _run_to(self, step: StepInput, depth: int) -> StepOutput:
        """Run every row to ``depth``."""
        output, flow = StepOutput.of_unread_tokens(step, len(self.column)), self._start(step)
        running, work = flow.running, step.state.work
        hidden = flow.run_layers(0, depth)[:, running.queries - step.last :]
        output.stop_rows(running.row_ids, depth, self.probe.emit_logits(hidden, depth, work))
        flow.stop_rows(np.arange(len(running)), NO_ROWS, depth)
        flow.finish()
        return output

    def _run_adaptive(self, step: StepInput) -> StepOutput:
        """Run each row until its rule fires, Ĥ_ℓ ≤ τ_ℓ, or its cap is reached, ℓ = D_{t−1}."""
        output, flow = StepOutput.of_unread_tokens(step, len(self.column)), self._start(step)
        layer, last, work = 0, step.last, step.state.work
        bins: NDArray[np.intp] | None = None
        before: Floats | None = None  # the previous probe's signal of the running rows
        while running := flow.running:
            below, layer = layer, self._next_exit(layer, running)
            hidden = flow.run_layers(below, layer)  # h_ℓ [running, n, D]
            stops, shown_logits = running.caps == layer, None  # ℓ = D_{t−1}
            column = self.column.get(layer) if running.reads_rule else None
            if column is not None:
                reading = self.probe.read(hidden[:, -1], column, work, running.row_ids)
                signal = output.signal[running.row_ids, -1, column] = to_numpy_float64(reading.signal)  # Ĥ_ℓ [running]
                if column == 0 and not self.has_one_bin:
                    bins = self._bins(running, len(output.depth), reading.logits)
                here = None if bins is None else bins[running.row_ids]
                decided = None if self.point.decay is None else step.decided[running.row_ids]
                stops |= is_exit_rule_met(self.point, column, signal, here, decided) & running.by_rule  # Ĥ_ℓ ≤ τ_ℓ
                if self.point.interpolate:
                    if before is not None:
                        planned = extrapolate_exits_between_probes(self.point, column, before, signal, here)
                        flow.running = running = _lower_planned_caps(running, planned)
                    before = signal
                shown_logits = None if reading.logits is None else reading.logits[:, None]
            if not stops.any():
                continue
            stopped, going = np.flatnonzero(stops), np.flatnonzero(~stops)
            if shown_logits is None:
                emitting = select_rows(hidden, stopped)[:, running.queries - last :]
                emitted = self.probe.emit_logits(emitting, layer, work)
            else:
                emitted = select_rows(shown_logits, stopped)[:, 1 - last :]  # of one token; ``last`` is 0 or 1
            output.stop_rows(running.row_ids[stopped], layer, emitted)  # D_t = ℓ
            flow.stop_rows(stopped, going, layer)
            before = None if before is None else before[going]
        flow.finish()
        return output

    def _run_chunk(self, step: StepInput) -> StepOutput:
        """Run several tokens per row in one pass, under the monotone rule D_t ≤ D_{t−1}.

        The running tokens of a row after layer ℓ are a prefix of the chunk. At a probe the first token of the prefix
        whose rule fires stops, with all tokens behind it; at the row's cap the rest stops. Prefixes are padded on the
        right to the longest. Padding is executed, so it is counted.
        """
        output, stepper, work = StepOutput.of_unread_tokens(step, len(self.column)), self.stepper, step.state.work
        inputs, last, layer = step.inputs, step.last, 0
        running, queries = inputs.running, inputs.running.queries
        length = np.full(len(running), queries)  # of each running row's prefix
        hidden = stepper.embed(step.tokens, inputs)
        self.probe.begin_step()
        while True:
            row_ids, cap = running.row_ids, running.lowest_cap
            below, layer = layer, min([cap, *(probe for probe in self.column if layer < probe < cap)])
            hidden = stepper.run_layers(hidden, below, layer, inputs)
            width = running.queries
            work.count_blocks(below, layer, len(running), width, inputs.executed)
            keep, place = length.copy(), np.arange(width)
            inside = place < keep[:, None]  # [running, width] without padding
            reading, column = None, self.column.get(layer)
            if column is not None:
                token_ids = (row_ids[:, None] * queries + place)[inside]
                reading = self.probe.read(hidden[torch.from_numpy(inside).to(hidden.device)], column, work, token_ids)
                values = np.full(inside.shape, np.nan)
                values[inside] = to_numpy_float64(reading.signal)
                output.signal[row_ids[:, None], place, column] = values
                fired = is_exit_rule_met(self.point, column, values) & inside
                keep = np.where(fired.any(axis=1), fired.argmax(axis=1), keep)
            keep = np.where(running.caps == layer, 0, keep)
            stopped = inside & (place >= keep[:, None])
            if not stopped.any():
                continue
            emitting = stopped & (place >= queries - last)
            if reading is not None and reading.logits is not None:
                emitted = reading.logits[torch.from_numpy(emitting[inside]).to(hidden.device)]
            else:
                emitted = self.probe.emit_logits(hidden[torch.from_numpy(emitting).to(hidden.device)], layer, work)
            which, where = np.nonzero(emitting)
            places = torch.from_numpy(row_ids[which]), torch.from_numpy(where - (queries - last))
            output.logits_like(emitted)[places] = emitted
            which, where = np.nonzero(stopped)
            output.depth[row_ids[which], where] = layer
            going = np.flatnonzero(keep > 0)
            if not len(going):
                return output
            length, widest = keep[going], int(keep[going].max())
            hidden = hidden[torch.from_numpy(going).to(hidden.device), :widest]
            starts = np.array(running.starts)[going]
            inputs = stepper.prepare_forward(
                starts[:, None] + np.arange(widest),
                inputs.cache,
                rows=row_ids[going],
                lengths=length,
                caps=running.caps[going],
                by_rule=running.by_rule[going],
            )
            running = inputs.running

    # ------------------------------------------------------------ parts of a step

    def _start(self, step: StepInput) -> Flow:
        """Embed the rows into the schedule's flow; the probe forgets the previous step."""
        self.probe.begin_step()
        hidden = self.stepper.embed(step.tokens, step.inputs)  # h_0
        return self.schedule.flow(step.state, hidden, step.inputs, self.point.ceiling)

    def _next_exit(self, layer: int, running: RunningRows) -> int:
        """The next layer after which a running row may stop: a probe if the rule reads, else the lowest cap."""
        probes = self.point.probes if running.reads_rule else ()
        return next((min(probe, running.lowest_cap) for probe in probes if probe > layer), running.lowest_cap)

    def _bins(self, running: RunningRows, rows: int, logits: Tensor | None) -> NDArray[np.intp]:
        """Bin of each of the session's ``rows`` at the first probe, 0 for a stopped row.

        ``logits`` [running, V]; a point without them refuses features that need them.
        """
        position = np.array(running.starts) + running.queries
        probability, top1 = np.zeros(len(running), dtype=np.float32), np.zeros(len(running), dtype=np.int64)
        if logits is not None:
            best = torch.log_softmax(logits.float(), dim=-1).max(dim=-1)
            probability, top1 = best.values.exp().cpu().numpy(), best.indices.cpu().numpy()
        bins = np.zeros(rows, dtype=np.intp)
        bins[running.row_ids] = assign_bins(self.point.bins, position, probability, top1)
        return bins


def _lower_planned_caps(running: RunningRows, planned: Ints) -> RunningRows:
    """``running`` with caps of at most the ``planned`` layers (0: none), of rows that the rule may stop."""
    chosen = running.by_rule & (planned > 0)
    return running.lower_caps(np.where(chosen, np.minimum(running.caps, planned), running.caps))
