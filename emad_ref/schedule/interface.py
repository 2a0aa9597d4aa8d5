"""What a schedule is, and the flow of one decoding step under it.

A schedule turns fires of a rule into admissible depth and settles the K/V that stopped rows leave unwritten:

    admission   the depths that the next token may take, given the depths of the tokens before it
    flow        what a decoding step does with rows that stop, and with the K/V above their exit
    replay      fires → depth over whole sequences, where that is exact
    work        which tokens the rule reads, and what each layer runs, given the depths (``schedule.derived_work``)

``ExitFlow`` serves schedules under which a row never returns to the layers above. ``SessionState`` holds what a session
keeps between steps: K/V, deferred states and the count of work. ``schedule.schedules`` lists the schedules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.kv_cache import KVCache
from emad_ref.models.stepper import ForwardContext, Stepper
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.probes.lens import StateTranslators
from emad_ref.record import Bools, Floats, Ints, Work

# ---------------------------------------------------------------- the flow of one step


class DeferredStates:
    """States [D] of tokens that stopped early and wait for their K/V above, by session row and position."""

    def __init__(self, rows: int):
        self.waiting: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def put(self, row: int, position: int, states: Tensor) -> None:
        """Keep copies of ``states`` [n, D] of the tokens from ``position`` on."""
        self.waiting[row] |= {position + i: state.clone() for i, state in enumerate(states)}

    def between(self, row: int, first: int, end: int) -> list[Tensor]:
        """States [D] of the tokens from ``first`` to before ``end``, all of which wait."""
        return [self.waiting[row][position] for position in range(first, end)]

    def remove(self, row: int, first: int, end: int) -> None:
        """The tokens from ``first`` to before ``end`` ran all layers."""
        for position in range(first, end):
            del self.waiting[row][position]

    def remove_before(self, end: Ints) -> None:
        """All tokens before ``end`` [rows] ran all layers."""
        for row, first in enumerate(end.tolist()):
            self.waiting[row] = {position: state for position, state in self.waiting[row].items() if position >= first}

    def truncate(self, length: Ints) -> None:
        """Forget tokens from ``length`` [rows] on."""
        for row, kept in enumerate(length.tolist()):
            self.waiting[row] = {position: state for position, state in self.waiting[row].items() if position < kept}

    def drop(self, kept: list[int]) -> None:
        """Keep only these rows, in order."""
        self.waiting = [self.waiting[row] for row in kept]


@dataclass(frozen=True, eq=False)
class SessionState:
    """What a session keeps between steps: K/V, states of tokens that stopped early, and the work executed so far."""

    stepper: Stepper
    cache: KVCache
    deferred: DeferredStates
    work: Work


class FlowStart(NamedTuple):
    """States ``hidden`` [rows, n, D] before layer 1, and what their way up needs."""

    state: SessionState
    ceiling: int
    hidden: Tensor
    context: ForwardContext
    translators: StateTranslators | None


class Flow(Protocol):
    """States of one step on their way up; it lives for one step and counts the work that it executes."""

    def run(self, first: int, last: int) -> Tensor:
        """Execute layers first+1 … last for the running rows; their states [running, n, D]."""

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        """Rows ``stopped`` (indices into the running ones) ended after ``layer``; ``going`` are the others."""

    def finish(self) -> None:
        """All rows have stopped: write the K/V that this step must leave behind."""


class ExitFlow:
    """Rows that stop leave the batch, and need nothing above."""

    def __init__(self, start: FlowStart):
        self.state, self.ceiling, self.hidden, self.context, self.translators = start
        self.running, self.layer = np.arange(len(self.hidden)), 0  # batch rows that have not stopped; layers run so far

    def run(self, first: int, last: int) -> Tensor:
        state = self.state
        self.hidden, self.layer = state.stepper.run(self.hidden, first, last, self.context, state.cache), last
        count_blocks(state.work, first, last, len(self.hidden), self.context.queries, self.context.executed)
        return self.hidden

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        if len(going) and len(stopped):
            self.hidden, self.context = rows_of(self.hidden, going), self.context.take(going)
        self.running = self.running[going]

    def finish(self) -> None:
        """Nothing is missing."""


def count_blocks(work: Work, first: int, last: int, rows: int, queries: int, keys: int) -> None:
    """Charge layers first+1 … last with ``rows`` × ``queries`` tokens against ``keys`` keys each."""
    work.tokens[first:last] += rows * queries
    work.context[first:last] += rows * queries * keys


def rows_of(states: Tensor, rows: Ints) -> Tensor:
    """The ``rows`` (int64 indices) of ``states`` [n, …]; the tensor itself where they are all of them."""
    return states if len(rows) == len(states) else states[torch.from_numpy(rows).to(states.device)]


# ---------------------------------------------------------------- a schedule


@dataclass(frozen=True)
class Admission:
    """``cap``: the largest admissible depth; ``held``: the token takes it, and the rule does not read it."""

    cap: int
    held: bool = False


class LayerRun(NamedTuple):
    """One layer, token by token: ``keys`` int64 [tokens] that each attended to, 0 where it did not run the block.

    ``fills`` bool [tokens]: where the layer only writes K and V; None: nowhere.
    """

    keys: Ints
    fills: Bools | None = None


class LayerTotals(NamedTuple):
    """``LayerRun`` of every layer, summed over tokens, int64 [L]; ``fills`` None: none in any layer."""

    tokens: Ints
    context: Ints
    fills: Ints | None = None


@dataclass(frozen=True)
class TokenPositions:
    """Of a trace: ``position`` int64 [tokens] of each in its sequence; ``starts`` int64 [sequences + 1] offsets."""

    position: Ints
    starts: Ints

    @cached_property
    def keys(self) -> Ints:
        """int64 [tokens] keys that each attends to in a step of its own: all positions up to its own."""
        return self.position + 1

    @cached_property
    def float_keys(self) -> Floats:
        """float64 [tokens] the same; products of floats are several times as fast, and exact below 2⁵³."""
        return self.keys.astype(np.float64)

    @cached_property
    def keys_before(self) -> Ints:
        """int64 [tokens + 1] ``keys`` of all tokens before each, and of all at last."""
        sums: Ints = np.concatenate([[0], self.keys.cumsum()])
        return sums

    @cached_property
    def decided(self) -> Ints:
        """int64 [tokens] index of each among the decided ones of its sequence."""
        index: Ints = np.arange(len(self.position)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return index

    @cached_property
    def ends(self) -> Ints:
        """int64 [tokens] end of each one's sequence."""
        ends: Ints = np.repeat(self.starts[1:], np.diff(self.starts))
        return ends


DepthResolver = Callable[[OperatingPoint, NDArray[np.int16]], None]


def asks_every_token(point: OperatingPoint, decided: Ints) -> Bools:
    return np.ones(len(decided), dtype=np.bool_)


def layer_run_once(positions: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerRun:
    """Each token runs a layer on its own way up, against the keys of all positions up to its own, or never."""
    return LayerRun((depth >= layer) * positions.keys)


def layer_totals_once(positions: TokenPositions, depth: Ints, histogram: Ints, ceiling: int) -> LayerTotals:
    """``layer_run_once`` of all layers."""
    tokens = tokens_reaching(histogram)
    context = (tokens == len(depth)) * positions.keys_before[-1]
    for layers, deep in layer_groups(depth, histogram):
        context[layers] = int(positions.float_keys @ deep)
    return LayerTotals(tokens, context)


@dataclass(frozen=True)
class Schedule:
    """One schedule.

    ``admit(point, trail, first, length)`` what the token after ``trail[:length]`` may take. ``trail``: depths of a
                    sequence's tokens, oldest first; those before index ``first`` are its prompt.
    ``flow``        opens the flow of one step.
    ``why``         why a depth that it does not admit is wrong, for messages.
    ``asked(point, decided)`` bool [tokens] whether the rule reads the tokens of these indices [tokens].
    ``ran(positions, depth, layer, ceiling)`` what ``layer`` ran for tokens of ``depth`` [tokens], fed one by one. It
                    depends on which tokens went as deep, and on whether ``layer`` lies below, at or above the ceiling.
    ``counted(positions, depth, histogram, ceiling)`` the same of all layers, summed over tokens, but faster.
                    ``histogram`` int64 [L + 1]: tokens of each depth. Equality with ``ran`` is a law.
    ``fills``       which of ``record.FILLS`` its K/V-only passes are.
    ``settle(point, depth)`` turns first fires int16 [longest, sequences], rows being decided tokens from each
                    sequence's first, into depths, in place: exact where the state of every token at its depth is the
                    full model's. None where only decoding knows the depths; then ``unreplayable`` says why.
    ``never_rises`` K/V above a row's cap are never needed again: a commit frees them.
    ``deepens``     tokens that stopped keep their state and may go on to any depth (``Session.deepen``).
    ``ruleless``    the position of a token decides its depth, whatever fires.
    ``by_prefix``   the tokens of a chunk that still run after a layer are a prefix of it, so one pass decides all.
    """

    name: ScheduleName
    admit: Callable[[OperatingPoint, Sequence[int], int, int], Admission]
    flow: Callable[[FlowStart], Flow]
    why: str
    settle: DepthResolver | None
    asked: Callable[[OperatingPoint, Ints], Bools] = asks_every_token
    ran: Callable[[TokenPositions, Ints, int, int], LayerRun] = layer_run_once
    counted: Callable[[TokenPositions, Ints, Ints, int], LayerTotals] = layer_totals_once
    unreplayable: str = ""
    fills: str = "exact"
    never_rises: bool = False
    deepens: bool = False
    ruleless: bool = False
    by_prefix: bool = False

    def in_replay(self) -> DepthResolver:
        """How fires become depths in replay. Raises BadArgument where only decoding knows."""
        if self.settle is None:
            raise BadArgument("point.schedule", self.name, "an exact schedule", self.unreplayable)
        return self.settle


def tokens_reaching(histogram: Ints) -> Ints:
    """int64 [L] how many tokens go to each layer, or past it."""
    sums: Ints = histogram[:0:-1].cumsum()[::-1]
    return sums


def layer_groups(depth: Ints, histogram: Ints) -> Iterator[tuple[slice, Bools]]:
    """Layers that the same tokens reach, neither all of them nor none; and bool [tokens] which those are."""
    small = depth.astype(np.int16)  # compared in a third of the time
    for below, top in itertools.pairwise(np.flatnonzero(histogram).tolist()):
        yield slice(below, top), small >= top
