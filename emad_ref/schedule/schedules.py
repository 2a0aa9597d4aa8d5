"""Schedules: their interface, and a table of the seven by name.

A schedule turns fires of a rule into admissible depths D_t and writes the K/V that stopped rows leave unwritten:

    admission   the depths that token t may take, given D_1 … D_{t−1} of its sequence
    flow        handling of rows that stop in a decoding step, and of the K/V above their exit
    replay      fires → D_t over whole sequences, where that is exact
    work        which tokens the rule reads, and what each layer runs, given D_t (``schedule.derived_work``)

``ExitFlow`` serves schedules under which a row never returns to the layers above. ``SessionState`` holds what a session
keeps between steps: K/V, deferred states and the count of work.

    monotone       D_t = min(D_{t−1}, first ℓ of P with Ĥ_ℓ ≤ τ_ℓ) (EMAD, "KV-consistent scheduling"): exact, K/V never
                   missing
    positional     D_t = round(ceiling − (ceiling − floor)·min(t, period)/period) (SkipDecode): no rule at all
    free_eager     any D_t; stopped rows run on to write K/V above (EMAD, "Ablations: Schedule constraint"): exact,
                   saves at most one block
    free_deferred  any D_t; states of stopped rows wait until a deeper token of their row needs them (FREE): exact
    chunked        one D_t per ``period`` tokens, decided at the first of them (EMAD, "Baselines"); deferred otherwise:
                   exact
    copying        any D_t; K/V above the exit ℓ come from its state, h^i = h^ℓ for i = ℓ+1 … L (CALM; early-exit LLMs,
                   "Preliminaries"): approximate, decoded and never replayed
    translated     copying through state translators, ĥ_i = h_ℓ + U·(Vᵀ·h_ℓ) + b: approximate likewise

L is ``point.layers``, and ``point.ceiling`` the most layers that a token may run. Under an exact schedule the state h_ℓ
of a token at each layer it runs is the full model's, so a lens trace can replay it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.kv_cache import KVCache, RunningRows
from emad_ref.models.stepper import LayerInputs, Stepper
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.probes.tuned_lens import StateTranslators
from emad_ref.record import Bools, Floats, Ints, Work

# ---------------------------------------------------------------- the flow of one step


class DeferredStates:
    """States [D] of tokens that stopped early and wait for their K/V above, by session row and position."""

    def __init__(self, rows: int):
        self.waiting: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def put(self, row: int, position: int, states: Tensor) -> None:
        """Keep copies of ``states`` [n, D] of the tokens from ``position`` on."""
        self.waiting[row] |= {position + i: state.clone() for i, state in enumerate(states)}

    def get_range(self, row: int, first: int, end: int) -> list[Tensor]:
        """States [D] of the tokens from ``first`` to before ``end``, which must all wait."""
        return [self.waiting[row][position] for position in range(first, end)]

    def remove(self, row: int, first: int, end: int) -> None:
        """Remove the tokens from ``first`` to before ``end``, which ran all layers."""
        for position in range(first, end):
            del self.waiting[row][position]

    def remove_before(self, end: Ints) -> None:
        """Remove all tokens before ``end`` [rows], which ran all layers."""
        for row, first in enumerate(end.tolist()):
            self.waiting[row] = {position: state for position, state in self.waiting[row].items() if position >= first}

    def truncate(self, length: Ints) -> None:
        """Forget tokens from ``length`` [rows] on."""
        for row, kept in enumerate(length.tolist()):
            self.waiting[row] = {position: state for position, state in self.waiting[row].items() if position < kept}

    def keep_rows(self, kept: list[int]) -> None:
        """Keep only these rows, in order."""
        self.waiting = [self.waiting[row] for row in kept]


@dataclass(frozen=True, eq=False)
class SessionState:
    """What a session keeps between steps: K/V, states of tokens that stopped early, and the work executed so far.

    ``translators``: of the point, for copied states; None: states are copied as they are.
    """

    stepper: Stepper
    cache: KVCache
    deferred: DeferredStates
    work: Work
    translators: StateTranslators | None = None


class Flow(Protocol):
    """Runs the states of one step through the layers, and counts the executed work; one object per step.

    ``running``: the rows that still run, in the order of the states that ``run_layers`` returns.
    """

    running: RunningRows

    def run_layers(self, first: int, last: int) -> Tensor:
        """Execute layers first+1 … last for the running rows; their states h_last [running, n, D]."""

    def stop_rows(self, stopped: Ints, going: Ints, layer: int) -> None:
        """Stop rows ``stopped`` (indices into the running ones) after ``layer``; ``going`` are the others."""

    def finish(self) -> None:
        """After all rows have stopped, write the remaining K/V of this step."""


class ExitFlow:
    """Flow in which rows that stop leave the batch and need no K/V above.

    ``hidden`` [rows, n, D]: h_0 of the step's tokens, of all rows of the session; ``inputs``: of its layers.
    """

    def __init__(self, state: SessionState, hidden: Tensor, inputs: LayerInputs, ceiling: int):
        self.state, self.hidden, self.inputs, self.ceiling = state, hidden, inputs, ceiling
        self.running, self.layer = inputs.running, 0  # ``layer``: layers run so far

    def run_layers(self, first: int, last: int) -> Tensor:
        """See ``Flow.run_layers``. Counts rows · n tokens and rows · n · keys of context in each layer.

        ``inputs.executed`` is the number of keys, or more where a captured graph fixes it.
        """
        state, inputs = self.state, self.inputs
        self.hidden, self.layer = state.stepper.run_layers(self.hidden, first, last, inputs), last
        state.work.count_blocks(first, last, len(self.hidden), inputs.running.queries, inputs.executed)
        return self.hidden

    def stop_rows(self, stopped: Ints, going: Ints, layer: int) -> None:
        """See ``Flow.stop_rows``."""
        self.running = self.running.keep(going)
        if len(going) and len(stopped):
            self.hidden, self.inputs = select_rows(self.hidden, going), self.inputs.select_rows(self.running)

    def finish(self) -> None:
        """Do nothing: no K/V is missing."""


def select_rows(states: Tensor, rows: Ints) -> Tensor:
    """The ``rows`` (int64 indices) of ``states`` [n, …]; the tensor itself if they are all rows."""
    return states if len(rows) == len(states) else states[torch.from_numpy(rows).to(states.device)]


# ---------------------------------------------------------------- a schedule


@dataclass(frozen=True)
class TokenDepthCap:
    """Admission: ``cap``, the largest admissible depth; ``fixed``: the token takes it and reads no rule."""

    cap: int
    fixed: bool = False


class LayerWorkByToken(NamedTuple):
    """Counts of one layer by token: ``keys`` int64 [tokens] attended to, 0 if the token did not run the block.

    ``fills`` bool [tokens]: where the layer only writes K and V; None: nowhere.
    """

    keys: Ints
    fills: Bools | None = None


class WorkTotalsByLayer(NamedTuple):
    """``LayerWorkByToken`` of every layer, summed over tokens, int64 [L]; ``fills`` None: none in any layer."""

    tokens: Ints
    context: Ints
    fills: Ints | None = None


@dataclass(frozen=True)
class TokenPositions:
    """Positions of a trace: ``position`` int64 [tokens] in each sequence; ``starts`` int64 [sequences + 1] offsets."""

    position: Ints
    starts: Ints

    @cached_property
    def attended_keys(self) -> Ints:
        """int64 [tokens] keys that each token attends to in its own step: all positions up to its own."""
        return self.position + 1

    @cached_property
    def float_attended_keys(self) -> Floats:
        """``attended_keys`` as float64 [tokens]: products are several times as fast, and exact below 2⁵³."""
        return self.attended_keys.astype(np.float64)

    @cached_property
    def cumulative_keys(self) -> Ints:
        """int64 [tokens + 1] sum of ``attended_keys`` over all tokens before each; the last entry over all tokens."""
        sums: Ints = np.concatenate([[0], self.attended_keys.cumsum()])
        return sums

    @cached_property
    def index_among_decided_tokens(self) -> Ints:
        """int64 [tokens] index of each token among the decided ones of its sequence."""
        index: Ints = np.arange(len(self.position)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return index

    def sum_by_sequence(self, values: NDArray[Any]) -> Floats:
        """float64 [sequences] sums of ``values`` [tokens] within each sequence; 0 for one without tokens."""
        sums, filled = np.zeros(len(self.starts) - 1), np.diff(self.starts) > 0
        # reduceat would give an empty segment the next value
        sums[filled] = np.add.reduceat(np.asarray(values, dtype=np.float64), self.starts[:-1][filled])
        return sums

    @cached_property
    def sequence_end_by_token(self) -> Ints:
        """int64 [tokens] end of each token's sequence."""
        ends: Ints = np.repeat(self.starts[1:], np.diff(self.starts))
        return ends


DepthResolver = Callable[[OperatingPoint, NDArray[np.int16]], None]


def mask_of_all_tokens(point: OperatingPoint, decided: Ints) -> Bools:
    """True for each of the ``decided`` tokens: the rule reads them all."""
    return np.ones(len(decided), dtype=np.bool_)


def single_pass_layer_counts(positions: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerWorkByToken:
    """Counts if each token runs a layer in its own step, against the keys of all positions up to its own, or never."""
    return LayerWorkByToken((depth >= layer) * positions.attended_keys)


def single_pass_work_by_layer(
    positions: TokenPositions, depth: Ints, histogram: Ints, ceiling: int
) -> WorkTotalsByLayer:
    """``single_pass_layer_counts`` of all layers."""
    tokens = count_reaching_tokens_from_histogram(histogram)
    context = (tokens == len(depth)) * positions.cumulative_keys[-1]
    for layers, deep in group_layers_by_tokens(depth, histogram):
        context[layers] = int(positions.float_attended_keys @ deep)
    return WorkTotalsByLayer(tokens, context)


@dataclass(frozen=True)
class Schedule:
    """One schedule.

    ``admit(point, trail, first_decided, t)`` admission of token t, counted from 0 with the prompt. ``trail``: depths of
                    the sequence's tokens up to t − 1 or further; those before ``first_decided`` are its prompt.
    ``flow(state, hidden, inputs, ceiling)`` opens the flow of one step; see ``ExitFlow``.
    ``inadmissible_reason`` reason against an inadmissible depth, for messages.
    ``reads_rule_at(point, decided)`` bool [tokens] whether the rule reads the tokens of these indices [tokens].
    ``layer_work(positions, depth, layer, ceiling)`` work of ``layer`` for tokens of ``depth`` [tokens], fed one by one;
                    it depends on which tokens reach the layer and on the ceiling.
    ``layer_work_totals(positions, depth, histogram, ceiling)`` the same of all layers, summed over tokens, but faster.
                    ``histogram`` int64 [L + 1]: tokens of each depth. Equality with ``layer_work`` is a law.
    ``fills``       which of ``record.FILLS`` its K/V-only passes are.
    ``resolve_depths(point, depth)`` turns first fires into depths, in place. ``depth`` int16 [longest, sequences]: its
                    rows are decided tokens, from each sequence's first. It is exact if the state of every token at its
                    depth is the full model's. None if depths need decoding; ``unreplayable`` is the reason.
    ``never_rises`` K/V above a row's cap are never needed again, so a commit frees them.
    ``deepens``     stopped tokens keep their state and may continue to any depth (``Session.deepen``).
    ``ruleless``    the position of a token decides its depth, whether or not a rule fires.
    ``by_prefix``   the tokens of a chunk that still run after a layer are a prefix of it, so one pass decides all.
    """

    name: ScheduleName
    admit: Callable[[OperatingPoint, Sequence[int], int, int], TokenDepthCap]
    flow: Callable[[SessionState, Tensor, LayerInputs, int], Flow]
    inadmissible_reason: str
    resolve_depths: DepthResolver | None
    reads_rule_at: Callable[[OperatingPoint, Ints], Bools] = mask_of_all_tokens
    layer_work: Callable[[TokenPositions, Ints, int, int], LayerWorkByToken] = single_pass_layer_counts
    layer_work_totals: Callable[[TokenPositions, Ints, Ints, int], WorkTotalsByLayer] = single_pass_work_by_layer
    unreplayable: str = ""
    fills: str = "exact"
    never_rises: bool = False
    deepens: bool = False
    ruleless: bool = False
    by_prefix: bool = False

    def require_depth_resolver(self) -> DepthResolver:
        """The function that turns fires into depths in replay. Raises BadArgument if depths need decoding."""
        if self.resolve_depths is None:
            raise BadArgument("point.schedule", self.name, "an exact schedule", self.unreplayable)
        return self.resolve_depths


def count_reaching_tokens_from_histogram(histogram: Ints) -> Ints:
    """int64 [L] number of tokens that reach each layer."""
    sums: Ints = histogram[:0:-1].cumsum()[::-1]
    return sums


def group_layers_by_tokens(depth: Ints, histogram: Ints) -> Iterator[tuple[slice, Bools]]:
    """Groups of layers that the same tokens reach, some but not all; and bool [tokens] which tokens."""
    small = depth.astype(np.int16)  # compared in a third of the time
    for below, top in itertools.pairwise(np.flatnonzero(histogram).tolist()):
        yield slice(below, top), small >= top


FREE_DEPTH_REASON = "no layer lies outside the model or above the ceiling"


# ---------------------------------------------------------------- monotone and positional: depth never rises


def _admit_monotone(point: OperatingPoint, trail: Sequence[int], first_decided: int, t: int) -> TokenDepthCap:
    """D_t ≤ D_{t−1}; the first token of a sequence may take the ceiling (EMAD, "KV-consistent scheduling")."""
    return TokenDepthCap(trail[t - 1] if t else point.ceiling)


def _resolve_monotone(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    """D_t = min over s ≤ t of the first fire of s, by doubling: several times as fast as ``np.minimum.accumulate``."""
    span = 1
    while span < len(depth):
        np.minimum(depth[span:], depth[:-span], out=depth[span:])
        span *= 2


def depths_from_token_index(point: OperatingPoint, decided: Ints) -> Ints:
    """int64 D_t of the decided tokens t (0 = a sequence's first), any shape: a line down to ``floor`` (SkipDecode)."""
    assert point.period is not None
    assert point.floor is not None
    gone = np.minimum(decided, point.period) / point.period
    depths: Ints = np.rint(point.ceiling - (point.ceiling - point.floor) * gone).astype(np.int64)
    return depths


def _admit_positional(point: OperatingPoint, trail: Sequence[int], first_decided: int, t: int) -> TokenDepthCap:
    return TokenDepthCap(int(depths_from_token_index(point, np.array([max(t - first_decided, 0)]))[0]), fixed=True)


def _resolve_positional(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    depth[:] = depths_from_token_index(point, np.arange(len(depth)))[:, None]


def _asks_no_token(point: OperatingPoint, decided: Ints) -> Bools:
    return np.zeros(len(decided), dtype=np.bool_)


# ---------------------------------------------------------------- free depth: K/V above an exit is written later


def admit_full_depth(point: OperatingPoint, trail: Sequence[int], first_decided: int, t: int) -> TokenDepthCap:
    """Admit full depth, whatever the previous tokens' depths."""
    return TokenDepthCap(point.ceiling)


def _resolve_free(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    """Leave depths as they are: a token's own first fire is its depth."""


class EagerFlow(ExitFlow):
    """Flow in which stopped rows run on, the last layer as a K/V-only pass; the rule still reads ``running`` rows.

    The backfill that the monotone schedule avoids (EMAD, "KV-consistent scheduling").
    """

    def run_layers(self, first: int, last: int) -> Tensor:
        return select_rows(super().run_layers(first, last), self.running.row_ids)

    def stop_rows(self, stopped: Ints, going: Ints, layer: int) -> None:
        self.running = self.running.keep(going)

    def finish(self) -> None:
        if self.layer == self.ceiling:
            return
        super().run_layers(self.layer, self.ceiling - 1)
        self.state.stepper.write_kv(self.hidden, self.ceiling, self.inputs)
        self.state.work.count_fills("exact", self.ceiling, self.hidden.shape[:2].numel())


def _eager_layer_run(positions: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerWorkByToken:
    """Counts if every block below the ceiling runs for every token; the last only writes K and V of stopped tokens."""
    went = depth >= layer
    ran = went | (layer < ceiling)
    return LayerWorkByToken(ran * positions.attended_keys, ~went if layer == ceiling else None)


def _eager_layer_totals(positions: TokenPositions, depth: Ints, histogram: Ints, ceiling: int) -> WorkTotalsByLayer:
    tokens, context = single_pass_work_by_layer(positions, depth, histogram, ceiling)[:2]
    tokens[: ceiling - 1], context[: ceiling - 1] = len(depth), positions.cumulative_keys[-1]
    fills = np.zeros_like(tokens)
    fills[ceiling - 1] = len(depth) - tokens[ceiling - 1]
    return WorkTotalsByLayer(tokens, context, fills)


class DeferredFlow(ExitFlow):
    """Flow in which states of stopped rows wait until a deeper token of their row runs them along, layer by layer.

    FREE (Bae et al., 2023), "synchronized parallel decoding".
    """

    def run_layers(self, first: int, last: int) -> Tensor:
        for below, top, held in _layers_by_entries(self.state.cache, first, last, self.running.rows):
            if held == self.running.starts:
                super().run_layers(below, top)
            else:
                self._run_with_waiting(below, top, held)
        return self.hidden

    def stop_rows(self, stopped: Ints, going: Ints, layer: int) -> None:
        if layer < self.ceiling:
            for i in stopped.tolist():
                self.state.deferred.put(self.running.rows[i], self.running.starts[i], self.hidden[i])
        super().stop_rows(stopped, going, layer)

    def _run_with_waiting(self, first: int, last: int, held: tuple[int, ...]) -> None:
        """Run layers that lack earlier tokens of some row, over each row's waiting states and its current ones."""
        rows, starts, deferred = self.running.rows, self.running.starts, self.state.deferred
        chunks = [
            torch.stack([*deferred.get_range(row, begin, start), *current])
            for row, begin, start, current in zip(rows, held, starts, self.hidden, strict=True)
        ]
        states = _run_ragged(self.state, chunks, rows, held, first, last)
        for row, begin, start, higher in zip(rows, held, starts, states, strict=True):
            if last == self.ceiling:
                deferred.remove(row, begin, start)
            else:
                deferred.put(row, begin, higher[: start - begin])
        self.hidden = torch.stack([higher[-self.running.queries :] for higher in states])


def compute_deferred_states_at_ceiling(state: SessionState, ceiling: int, first: Ints, end: Ints) -> Tensor:
    """States [rows, n, D] at the ceiling of every session row's tokens from ``first`` to before ``end``, both [rows].

    All of them wait, each after its own layer; earlier tokens may wait too and run along. Each token runs each missing
    layer once. Rows with fewer missing tokens are padded, and the padding is counted.
    """
    deferred = state.deferred
    for below, top, held in _layers_by_entries(state.cache, 0, ceiling, range(len(end))):
        lacking = [row for row, begin in enumerate(held) if begin < end[row]]
        if not lacking:
            continue
        begins = [held[row] for row in lacking]
        chunks = [torch.stack(deferred.get_range(row, held[row], int(end[row]))) for row in lacking]
        states = _run_ragged(state, chunks, lacking, begins, below, top)
        for row, begin, higher in zip(lacking, begins, states, strict=True):
            deferred.put(row, begin, higher)
    bounds = list(zip(first.tolist(), end.tolist(), strict=True))
    reached = torch.stack([torch.stack(deferred.get_range(row, *span)) for row, span in enumerate(bounds)])
    deferred.remove_before(end)
    return reached


def _layers_by_entries(
    cache: KVCache, first: int, last: int, rows: Sequence[int]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(below, top, entries held of each of ``rows``): layers first+1 … last, grouped where they hold as many."""

    def entries(layer: int) -> tuple[int, ...]:
        length = cache.layers[layer - 1].row_lengths.tolist()
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
    """Run layers first+1 … last over one chunk [n_row, D] per row, each from its start on, padded to the longest.

    The padding is executed, so it is counted.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(chunks), batch_first=True)
    inputs = state.stepper.prepare_forward(
        np.array(starts)[:, None] + np.arange(padded.shape[1]),
        state.cache,
        rows=np.array(rows),
        lengths=np.array([len(chunk) for chunk in chunks]),
    )
    padded = state.stepper.run_layers(padded, first, last, inputs)
    state.work.count_blocks(first, last, len(rows), padded.shape[1], inputs.executed)
    return [states[: len(chunk)] for states, chunk in zip(padded, chunks, strict=True)]


def deferred_layer_counts(positions: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerWorkByToken:
    """Counts if tokens that stopped below run with the next token of their sequence that reaches the layer."""
    deep = np.flatnonzero(depth >= layer)
    taken_along = np.diff(deep, prepend=-1)  # tokens since the last that reached the layer, itself included
    keys = np.zeros(len(depth), dtype=np.int64)
    if len(deep):
        with_token = np.repeat(deep, taken_along)
        waiting = slice(0, len(with_token))
        keys[waiting] = (with_token < positions.sequence_end_by_token[waiting]) * positions.attended_keys[with_token]
    return LayerWorkByToken(keys)


def deferred_layer_totals(positions: TokenPositions, depth: Ints, histogram: Ints, ceiling: int) -> WorkTotalsByLayer:
    """``deferred_layer_counts`` of all layers, by the gaps between the tokens that reach a layer."""
    all_go = count_reaching_tokens_from_histogram(histogram) == len(depth)
    tokens, context = all_go * len(depth), all_go * positions.cumulative_keys[-1]
    for layers, deep in group_layers_by_tokens(depth, histogram):
        tokens[layers], context[layers] = (each.sum() for each in _deferred_sums(positions, np.flatnonzero(deep)))
    return WorkTotalsByLayer(tokens, context)


def deferred_sums_by_sequence(positions: TokenPositions, depth: Ints, layer: int) -> tuple[Ints, Ints]:
    """``deferred_layer_counts`` by sequence, int64 [sequences]: (tokens that run the layer, sum of their keys)."""
    return _deferred_sums(positions, np.flatnonzero(depth >= layer))


def _deferred_sums(positions: TokenPositions, deep: Ints) -> tuple[Ints, Ints]:
    """(Tokens that run a layer, sum of their keys), [sequences], if the tokens ``deep`` (ascending) reach it.

    Each of them runs the tokens along that wait before it in its sequence. A waiting token attends to the keys up to
    that token, one more per position in between: 0 + 1 + … + (g − 1) more for g tokens that run together.
    """
    tokens, context = np.zeros((2, len(positions.starts) - 1), dtype=np.int64)
    bounds = np.searchsorted(deep, positions.starts)
    some = np.flatnonzero(np.diff(bounds))  # sequences in which any token reaches the layer
    if not len(some):
        return tokens, context
    starts, first, ends = positions.starts[some], bounds[some], deep[bounds[some + 1] - 1] + 1
    together = np.empty_like(deep)
    np.subtract(deep[1:], deep[:-1], out=together[1:])
    together[first] = deep[first] - starts + 1
    tokens[some] = ends - starts
    waited = (np.add.reduceat(together * together, first) - tokens[some]) // 2
    context[some] = positions.cumulative_keys[ends] - positions.cumulative_keys[starts] + waited
    return tokens, context


# ---------------------------------------------------------------- chunked


def _admit_chunked(point: OperatingPoint, trail: Sequence[int], first_decided: int, t: int) -> TokenDepthCap:
    assert point.period is not None
    within = max(t - first_decided, 0) % point.period
    return TokenDepthCap(trail[t - within], fixed=True) if within else TokenDepthCap(point.ceiling)


def _resolve_chunked(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    assert point.period is not None
    first = np.arange(len(depth)) // point.period * point.period
    depth[:] = depth[first]


def _asks_chunk_start(point: OperatingPoint, decided: Ints) -> Bools:
    assert point.period is not None
    first: Bools = decided // point.period * point.period == decided  # faster than a remainder
    return first


# ---------------------------------------------------------------- copying: the exit's state serves all layers above


class CopyingFlow(ExitFlow):
    """Flow in which K/V above an exit come from the exit's state, or its translators, after all rows have stopped.

    h^i = h^ℓ for every layer i above the exit ℓ (CALM; early-exit LLMs, "Preliminaries: Transformer Architecture").
    """

    def __init__(self, state: SessionState, hidden: Tensor, inputs: LayerInputs, ceiling: int):
        super().__init__(state, hidden, inputs, ceiling)
        self.whole, self.exits = inputs, hidden.clone()
        self.depth = np.zeros(len(hidden), dtype=np.int64)

    def stop_rows(self, stopped: Ints, going: Ints, layer: int) -> None:
        chosen = self.running.row_ids[stopped]
        self.depth[chosen] = layer
        self.exits = self.exits.to(self.hidden.dtype)  # T5 in float16 has float32 states after its first block
        self.exits[torch.from_numpy(chosen).to(self.exits.device)] = select_rows(self.hidden, stopped)
        super().stop_rows(stopped, going, layer)

    def finish(self) -> None:
        exits = np.unique(self.depth).tolist()
        for exit_layer, next_exit in itertools.pairwise([*exits, self.ceiling]):
            rows = np.flatnonzero(self.depth <= exit_layer)
            inputs = self.whole.select_rows(self.whole.running.keep(rows))
            for layer in range(exit_layer + 1, next_exit + 1):
                states, work = select_rows(self.exits, rows), self.state.work
                if self.state.translators is not None:
                    states = self.state.translators.estimate_layer_input_states(states, self.depth[rows], layer, work)
                self.state.stepper.write_kv(states, layer, inputs)
                work.count_fills("copied", layer, states.shape[:2].numel())


def _copying_layer_run(positions: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerWorkByToken:
    """Counts if a token runs layers up to its depth; above it, up to the ceiling, its copy is filled in."""
    return single_pass_layer_counts(positions, depth, layer, ceiling)._replace(
        fills=(depth < layer) & (layer <= ceiling)
    )


def _copying_layer_totals(positions: TokenPositions, depth: Ints, histogram: Ints, ceiling: int) -> WorkTotalsByLayer:
    once = single_pass_work_by_layer(positions, depth, histogram, ceiling)
    fills = len(depth) - once.tokens
    fills[ceiling:] = 0
    return once._replace(fills=fills)


# ---------------------------------------------------------------- the table

MONOTONE = Schedule(
    name="monotone",
    admit=_admit_monotone,
    flow=ExitFlow,
    inadmissible_reason="under the monotone schedule depth never rises again within a sequence",
    resolve_depths=_resolve_monotone,
    never_rises=True,
    by_prefix=True,
)
POSITIONAL = Schedule(
    name="positional",
    admit=_admit_positional,
    flow=ExitFlow,
    inadmissible_reason="under the positional schedule the place of a token decides its depth",
    resolve_depths=_resolve_positional,
    reads_rule_at=_asks_no_token,
    never_rises=True,
    ruleless=True,
)
FREE_EAGER = Schedule(
    name="free_eager",
    admit=admit_full_depth,
    flow=EagerFlow,
    inadmissible_reason=FREE_DEPTH_REASON,
    resolve_depths=_resolve_free,
    layer_work=_eager_layer_run,
    layer_work_totals=_eager_layer_totals,
)
FREE_DEFERRED = Schedule(
    name="free_deferred",
    admit=admit_full_depth,
    flow=DeferredFlow,
    inadmissible_reason=FREE_DEPTH_REASON,
    resolve_depths=_resolve_free,
    layer_work=deferred_layer_counts,
    layer_work_totals=deferred_layer_totals,
    deepens=True,
)
CHUNKED = Schedule(
    name="chunked",
    admit=_admit_chunked,
    flow=DeferredFlow,
    inadmissible_reason="under the chunked schedule a chunk keeps the depth of its first token",
    resolve_depths=_resolve_chunked,
    reads_rule_at=_asks_chunk_start,
    layer_work=deferred_layer_counts,
    layer_work_totals=deferred_layer_totals,
)
COPYING = Schedule(
    name="copying",
    admit=admit_full_depth,
    flow=CopyingFlow,
    inadmissible_reason=FREE_DEPTH_REASON,
    resolve_depths=None,
    layer_work=_copying_layer_run,
    layer_work_totals=_copying_layer_totals,
    unreplayable="copied states are decoded, not replayed",
    fills="copied",
)
TRANSLATED = replace(COPYING, name="translated", unreplayable="translated states are decoded, not replayed")

SCHEDULES: dict[ScheduleName, Schedule] = {
    schedule.name: schedule
    for schedule in (MONOTONE, FREE_EAGER, FREE_DEFERRED, COPYING, TRANSLATED, POSITIONAL, CHUNKED)
}


def get_point_schedule(point: OperatingPoint) -> Schedule:
    """The schedule that ``point`` names."""
    return SCHEDULES[point.schedule]
