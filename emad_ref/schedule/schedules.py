"""The seven schedules, and the table of them by name.

    monotone       D_t = min(D_{t−1}, first fire of t) (EMAD, "KV-consistent scheduling"): exact, no K/V ever missing
    positional     D_t = round(ceiling − (ceiling − floor)·min(t, period)/period) (SkipDecode): no rule at all
    free_eager     any depth; stopped rows run on to write K/V above: exact, no compute saved
    free_deferred  any depth; states of stopped rows wait until a deeper token of their row needs them (FREE): exact
    chunked        one depth per ``period`` tokens, decided at the first of them; deferred otherwise: exact
    copying        any depth; the state at the exit fills K/V above it (CALM): approximate, decoded and never replayed
    translated     copying through state translators, ĥ_ℓ = h_e + U·(Vᵀ·h_e) + b: approximate likewise

Under an exact schedule the state of a token at each layer it runs is the full model's, so a lens trace can replay it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.exit_rules.rules import first_firing_probe
from emad_ref.models.kv_cache import KVCache
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.record import FILLS, Bools, Floats, Ints
from emad_ref.schedule.interface import (
    Admission,
    ExitFlow,
    FlowStart,
    LayerRun,
    LayerTotals,
    Schedule,
    SessionState,
    TokenPositions,
    count_blocks,
    layer_groups,
    layer_run_once,
    layer_totals_once,
    rows_of,
    tokens_reaching,
)

EXACT_FILL, COPIED_FILL = FILLS.index("exact"), FILLS.index("copied")
FREE_DEPTH_REASON = "no layer lies outside the model or above the ceiling"


# ---------------------------------------------------------------- monotone and positional: depth never rises


def monotone_depths(signal: Floats, thresholds: Floats, probes: Ints, ceiling: int) -> Ints:
    """Depths [n] of one sequence under ``monotone``, in its plain form: the running minimum of first fires.

    ``signal`` [n, probes] complete (NaN never fires); ``thresholds`` [probes] or [n, probes].
    """
    return np.minimum.accumulate(first_firing_probe(signal <= thresholds, probes, ceiling))


def _admit_monotone(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    return Admission(trail[length - 1] if length else point.ceiling)


def _resolve_monotone(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    """The running minimum by doubling: several times as fast as ``np.minimum.accumulate``."""
    span = 1
    while span < len(depth):
        np.minimum(depth[span:], depth[:-span], out=depth[span:])
        span *= 2


def positional_depths(point: OperatingPoint, decided: Ints) -> Ints:
    """int64 depth of the decided tokens of these indices (0 = the first of its sequence), any shape."""
    assert point.period is not None
    assert point.floor is not None
    gone = np.minimum(decided, point.period) / point.period
    depths: Ints = np.rint(point.ceiling - (point.ceiling - point.floor) * gone).astype(np.int64)
    return depths


def _admit_positional(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    return Admission(int(positional_depths(point, np.array([max(length - first, 0)]))[0]), held=True)


def _resolve_positional(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    depth[:] = positional_depths(point, np.arange(len(depth)))[:, None]


def _asks_no_token(point: OperatingPoint, decided: Ints) -> Bools:
    return np.zeros(len(decided), dtype=np.bool_)


# ---------------------------------------------------------------- free depth: K/V above an exit is written later


def admit_ceiling(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    """The tokens before do not matter."""
    return Admission(point.ceiling)


def _resolve_free(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    """A token's own first fire is its depth."""


class EagerFlow(ExitFlow):
    """All rows run on, the last layer as a K/V-only pass; ``running`` are those that the rule still reads."""

    def run(self, first: int, last: int) -> Tensor:
        return rows_of(super().run(first, last), self.running)

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        self.running = self.running[going]

    def finish(self) -> None:
        if self.layer == self.ceiling:
            return
        super().run(self.layer, self.ceiling - 1)
        self.state.stepper.fill(self.hidden, self.ceiling, self.context, self.state.cache)
        self.state.work.fills[EXACT_FILL, self.ceiling - 1] += self.hidden.shape[:2].numel()


def _eager_layer_run(positions: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerRun:
    """Every block below the ceiling runs for every token; of tokens that stopped the last one only writes K and V."""
    went = depth >= layer
    ran = went | (layer < ceiling)
    return LayerRun(ran * positions.keys, ~went if layer == ceiling else None)


def _eager_layer_totals(positions: TokenPositions, depth: Ints, histogram: Ints, ceiling: int) -> LayerTotals:
    tokens, context = layer_totals_once(positions, depth, histogram, ceiling)[:2]
    tokens[: ceiling - 1], context[: ceiling - 1] = len(depth), positions.keys_before[-1]
    fills = np.zeros_like(tokens)
    fills[ceiling - 1] = len(depth) - tokens[ceiling - 1]
    return LayerTotals(tokens, context, fills)


class DeferredFlow(ExitFlow):
    """Rows leave and their states wait; a deeper token of the same row takes them along, layer by layer."""

    def run(self, first: int, last: int) -> Tensor:
        for below, top, held in _layers_by_entries(self.state.cache, first, last, self.context.rows):
            if held == self.context.starts:
                super().run(below, top)
            else:
                self._run_with_waiting(below, top, held)
        return self.hidden

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        if layer < self.ceiling:
            for i in stopped.tolist():
                self.state.deferred.put(self.context.rows[i], self.context.starts[i], self.hidden[i])
        super().stop(stopped, going, layer)

    def _run_with_waiting(self, first: int, last: int, held: tuple[int, ...]) -> None:
        """Layers that lack earlier tokens of some row, over each row's waiting states and its current ones."""
        rows, starts, deferred = self.context.rows, self.context.starts, self.state.deferred
        chunks = [
            torch.stack([*deferred.between(row, begin, start), *current])
            for row, begin, start, current in zip(rows, held, starts, self.hidden, strict=True)
        ]
        states = _run_ragged(self.state, chunks, rows, held, first, last)
        for row, begin, start, higher in zip(rows, held, starts, states, strict=True):
            if last == self.ceiling:
                deferred.remove(row, begin, start)
            else:
                deferred.put(row, begin, higher[: start - begin])
        self.hidden = torch.stack([higher[-self.context.queries :] for higher in states])


def run_deferred_to_ceiling(state: SessionState, ceiling: int, first: Ints, end: Ints) -> Tensor:
    """States [rows, n, D] at the ceiling of every session row's tokens from ``first`` to before ``end``, both [rows].

    All of them wait, each after a layer of its own, and so may tokens before them, which go up along with them. Each
    token runs the layers that it lacks once; rows that lack fewer tokens are padded, and the padding is counted.
    """
    deferred = state.deferred
    for below, top, held in _layers_by_entries(state.cache, 0, ceiling, range(len(end))):
        lacking = [row for row, begin in enumerate(held) if begin < end[row]]
        if not lacking:
            continue
        begins = [held[row] for row in lacking]
        chunks = [torch.stack(deferred.between(row, held[row], int(end[row]))) for row in lacking]
        states = _run_ragged(state, chunks, lacking, begins, below, top)
        for row, begin, higher in zip(lacking, begins, states, strict=True):
            deferred.put(row, begin, higher)
    bounds = list(zip(first.tolist(), end.tolist(), strict=True))
    reached = torch.stack([torch.stack(deferred.between(row, *span)) for row, span in enumerate(bounds)])
    deferred.remove_before(end)
    return reached


def _layers_by_entries(
    cache: KVCache, first: int, last: int, rows: Sequence[int]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(below, top, entries held of each of ``rows``): layers first+1 … last, grouped where they hold as many."""

    def entries(layer: int) -> tuple[int, ...]:
        length = cache.layers[layer - 1].length.tolist()
        return tuple(length[row] for row in rows)

    below = first
    while below < last:
        held, top = entries(below + 1), below + 1
        while top < last and entries(top + 1) == held:
            top += 1
        yield below, top, held
        below = top


def _run_ragged(
    state: SessionState, chunks: Sequence[Tensor], rows: Sequence[int], starts: Sequence[int], first: int, last: int
) -> list[Tensor]:
    """Layers first+1 … last over one chunk [n_row, D] per row, each from its start on, padded to the longest.

    The padding is executed, so it is counted.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(chunks), batch_first=True)
    context = state.stepper.frame(
        np.array(starts)[:, None] + np.arange(padded.shape[1]),
        state.cache,
        rows=np.array(rows),
        lengths=np.array([len(chunk) for chunk in chunks]),
    )
    padded = state.stepper.run(padded, first, last, context, state.cache)
    count_blocks(state.work, first, last, len(rows), padded.shape[1], context.executed)
    return [states[: len(chunk)] for states, chunk in zip(padded, chunks, strict=True)]


def deferred_layer_run(positions: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerRun:
    """A token that stopped below runs with the next of its sequence that goes so deep, against that one's keys."""
    deep = np.flatnonzero(depth >= layer)
    taken_along = np.diff(deep, prepend=-1)  # tokens since the last that went so deep, itself included
    keys = np.zeros(len(depth), dtype=np.int64)
    if len(deep):
        with_token = np.repeat(deep, taken_along)
        waiting = slice(0, len(with_token))
        keys[waiting] = (with_token < positions.ends[waiting]) * positions.keys[with_token]
    return LayerRun(keys)


def deferred_layer_totals(positions: TokenPositions, depth: Ints, histogram: Ints, ceiling: int) -> LayerTotals:
    """``deferred_layer_run`` of all layers, by the gaps between the tokens that reach a layer."""
    all_go = tokens_reaching(histogram) == len(depth)
    tokens, context = all_go * len(depth), all_go * positions.keys_before[-1]
    for layers, deep in layer_groups(depth, histogram):
        tokens[layers], context[layers] = _deferred_sums(positions, np.flatnonzero(deep))
    return LayerTotals(tokens, context)


def _deferred_sums(positions: TokenPositions, deep: Ints) -> tuple[int, int]:
    """How many tokens run a layer, and against how many keys in all, where ``deep`` (ascending) go so deep.

    Each of them takes those along that wait before it in its sequence. One that waits has as many keys more than at its
    own position as tokens lie between: 0 + 1 + … + (g − 1) more for the g tokens that run together.
    """
    bounds = np.searchsorted(deep, positions.starts)
    some = np.flatnonzero(np.diff(bounds))  # sequences in which any token goes so deep
    starts, first, ends = positions.starts[some], bounds[some], deep[bounds[some + 1] - 1] + 1
    together = np.empty(len(deep))  # floats: their product is several times as fast, and exact below 2⁵³
    np.subtract(deep[1:], deep[:-1], out=together[1:])
    together[first] = deep[first] - starts + 1
    tokens = int((ends - starts).sum())
    waited = (int(together @ together) - tokens) // 2
    return tokens, int((positions.keys_before[ends] - positions.keys_before[starts]).sum()) + waited


# ---------------------------------------------------------------- chunked


def _admit_chunked(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    assert point.period is not None
    within = max(length - first, 0) % point.period
    return Admission(trail[length - within], held=True) if within else Admission(point.ceiling)


def _resolve_chunked(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    assert point.period is not None
    first = np.arange(len(depth)) // point.period * point.period
    depth[:] = depth[first]


def _asks_chunk_start(point: OperatingPoint, decided: Ints) -> Bools:
    assert point.period is not None
    first: Bools = decided // point.period * point.period == decided  # faster than a remainder
    return first


# ---------------------------------------------------------------- copying: the exit's state stands in for those above


class CopyingFlow(ExitFlow):
    """Rows leave; when all have, K/V above comes from the state that each left with, or from its translators."""

    def __init__(self, start: FlowStart):
        super().__init__(start)
        self.whole, self.exits = self.context, self.hidden.clone()
        self.depth = np.zeros(len(self.hidden), dtype=np.int64)

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        chosen = self.running[stopped]
        self.depth[chosen] = layer
        self.exits[torch.from_numpy(chosen).to(self.exits.device)] = rows_of(self.hidden, stopped)
        super().stop(stopped, going, layer)

    def finish(self) -> None:
        for layer in range(int(self.depth.min()) + 1, self.ceiling + 1):
            rows = np.flatnonzero(self.depth < layer)
            states = rows_of(self.exits, rows)
            if self.translators is not None:
                states = self.translators.below(states, self.depth[rows], layer, self.state.work)
            self.state.stepper.fill(states, layer, self.whole.take(rows), self.state.cache)
            self.state.work.fills[COPIED_FILL, layer - 1] += states.shape[:2].numel()


def _copying_layer_run(positions: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerRun:
    """A token runs a layer on its own way up; above its depth its copy is filled in, up to the ceiling."""
    return layer_run_once(positions, depth, layer, ceiling)._replace(fills=(depth < layer) & (layer <= ceiling))


def _copying_layer_totals(positions: TokenPositions, depth: Ints, histogram: Ints, ceiling: int) -> LayerTotals:
    once = layer_totals_once(positions, depth, histogram, ceiling)
    fills = len(depth) - once.tokens
    fills[ceiling:] = 0
    return once._replace(fills=fills)


# ---------------------------------------------------------------- the table

MONOTONE = Schedule(
    name="monotone",
    admit=_admit_monotone,
    flow=ExitFlow,
    why="under the monotone schedule depth never rises again within a sequence",
    settle=_resolve_monotone,
    never_rises=True,
    by_prefix=True,
)
POSITIONAL = Schedule(
    name="positional",
    admit=_admit_positional,
    flow=ExitFlow,
    why="under the positional schedule the place of a token decides its depth",
    settle=_resolve_positional,
    asked=_asks_no_token,
    never_rises=True,
    ruleless=True,
)
FREE_EAGER = Schedule(
    name="free_eager",
    admit=admit_ceiling,
    flow=EagerFlow,
    why=FREE_DEPTH_REASON,
    settle=_resolve_free,
    ran=_eager_layer_run,
    counted=_eager_layer_totals,
)
FREE_DEFERRED = Schedule(
    name="free_deferred",
    admit=admit_ceiling,
    flow=DeferredFlow,
    why=FREE_DEPTH_REASON,
    settle=_resolve_free,
    ran=deferred_layer_run,
    counted=deferred_layer_totals,
    deepens=True,
)
CHUNKED = Schedule(
    name="chunked",
    admit=_admit_chunked,
    flow=DeferredFlow,
    why="under the chunked schedule a chunk keeps the depth of its first token",
    settle=_resolve_chunked,
    asked=_asks_chunk_start,
    ran=deferred_layer_run,
    counted=deferred_layer_totals,
)
COPYING = Schedule(
    name="copying",
    admit=admit_ceiling,
    flow=CopyingFlow,
    why=FREE_DEPTH_REASON,
    settle=None,
    ran=_copying_layer_run,
    counted=_copying_layer_totals,
    unreplayable="copied states are decoded, not replayed",
    fills="copied",
)
TRANSLATED = replace(COPYING, name="translated", unreplayable="translated states are decoded, not replayed")

SCHEDULES: dict[ScheduleName, Schedule] = {
    schedule.name: schedule
    for schedule in (MONOTONE, FREE_EAGER, FREE_DEFERRED, COPYING, TRANSLATED, POSITIONAL, CHUNKED)
}


def schedule_of(point: OperatingPoint) -> Schedule:
    """The schedule that ``point`` names."""
    return SCHEDULES[point.schedule]
