"""What a schedule is, and the flow of one decoding step under it.

A schedule turns fires of a rule into admissible depth and settles the K/V that stopped rows leave unwritten:

    admission   the depths that the next token may take, given the depths of the tokens before it
    flow        what a decoding step does with rows that stop, and with the K/V above their exit
    replay      fires → depth over whole sequences, where that is exact
    work        which tokens the rule reads, and what each layer runs, given the depths (``schedule.derived_work``)

``ExitFlow`` serves schedules under which a row never returns to the layers above. ``SessionState`` holds what a
session
keeps between steps: K/V, deferred states and the count of work.
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


class DeferredStates:
    """States of tokens that stopped early and may have to go on: per session row, position → state [D] so far."""

    def __init__(self, rows: int):
        self.waiting: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def put(self, row: int, position: int, states: Tensor) -> None:
        """Keep copies of ``states`` [n, D] of the tokens from ``position`` on."""
        self.waiting[row] |= {position + i: state.clone() for i, state in enumerate(states)}

    def between(self, row: int, first: int, end: int) -> list[Tensor]:
        """States [D] of the tokens from ``first`` to before ``end``, all of which wait."""
        return [self.waiting[row][position] for position in range(first, end)]

    def forget(self, row: int, first: int, end: int) -> None:
        """The tokens from ``first`` to before ``end`` have nothing left to do."""
        for position in range(first, end):
            del self.waiting[row][position]

    def forget_all(self, end: Ints) -> None:
        """No token before ``end`` [rows] has anything left to do."""
        for row, held in enumerate(end.tolist()):
            self.waiting[row] = {position: state for position, state in self.waiting[row].items() if position >= held}

    def truncate(self, length: Ints) -> None:
        """Forget tokens from ``length`` [rows] on."""
        for row, kept in enumerate(length.tolist()):
            self.waiting[row] = {position: state for position, state in self.waiting[row].items() if position < kept}

    def drop(self, kept: list[int]) -> None:
        """Keep only these rows, in order."""
        self.waiting = [self.waiting[row] for row in kept]


@dataclass(frozen=True, eq=False)  # holds what changes from step to step: a store is itself, not its values
class SessionState:
    """What a session keeps: ``cache`` of its K/V, ``owed`` states of its tokens, ``work`` executed for its tokens."""

    stepper: Stepper
    cache: KVCache
    owed: DeferredStates
    work: Work


class FlowStart(NamedTuple):
    """Where a flow sets out: states ``hidden`` [rows, n, D] before layer 1, their frame, and the point's ceiling.

    ``translators``: the point's, of a schedule that has them.
    """

    store: SessionState
    ceiling: int
    hidden: Tensor
    frame: ForwardContext
    translators: StateTranslators | None


class Flow(Protocol):
    """States of one step on their way up."""

    def run(self, first: int, last: int) -> Tensor:
        """Execute layers first+1 … last for the running rows; their states [running, n, D]."""

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        """Rows ``stopped`` (indices into the running ones) ended after ``layer``; ``going`` are the others."""

    def finish(self) -> None:
        """All rows have stopped: settle what this step owes at once."""


class ExitFlow:
    """Rows only leave; compact them."""

    def __init__(self, start: FlowStart):
        self.store, self.ceiling, self.hidden, self.frame, self.translators = start
        self.running, self.at = np.arange(len(self.hidden)), 0  # batch rows that have not stopped; layers run so far

    def run(self, first: int, last: int) -> Tensor:
        store = self.store
        self.hidden, self.at = store.stepper.run(self.hidden, first, last, self.frame, store.cache), last
        count_blocks(store.work, first, last, len(self.hidden), self.frame.queries, self.frame.executed)
        return self.hidden

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        if len(going) and len(stopped):
            self.hidden, self.frame = rows_of(self.hidden, going), self.frame.take(going)
        self.running = self.running[going]

    def finish(self) -> None:
        """Nothing is owed."""


def count_blocks(work: Work, first: int, last: int, rows: int, queries: int, keys: int) -> None:
    """Charge layers first+1 … last with ``rows`` × ``queries`` tokens against ``keys`` keys each."""
    work.tokens[first:last] += rows * queries
    work.context[first:last] += rows * queries * keys


def rows_of(states: Tensor, rows: Ints) -> Tensor:
    """``states`` [n, …] of these ``rows`` alone, int64 indices; the tensor itself where they are all of them."""
    return states if len(rows) == len(states) else states[torch.from_numpy(rows).to(states.device)]


@dataclass(frozen=True)
class Admission:
    """``cap``: the largest admissible depth; ``held``: the token takes it unasked."""

    cap: int
    held: bool = False


class LayerRun(NamedTuple):
    """What decoding makes one layer run, token by token: ``keys`` int64 [tokens] that each attended to, 0 for those
    that did not run the block.

    ``fills`` bool [tokens]: of which it only writes K and V; None: of none.
    """

    keys: Ints
    fills: Bools | None = None


class LayerTotals(NamedTuple):
    """``LayerRun`` of every layer, all tokens together, int64 [L]: how many ran it, against how many keys in all.

    ``fills``: how many only write K and V there; None: none anywhere.
    """

    tokens: Ints
    context: Ints
    fills: Ints | None = None


@dataclass(frozen=True)
class TokenPositions:
    """Where a trace's tokens stand: ``position`` int64 [tokens] of each in its sequence, prompt included.

    ``starts`` int64 [sequences + 1]: offsets of the sequences.
    """

    position: Ints
    starts: Ints

    @cached_property
    def keys(self) -> Ints:
        """int64 [tokens] keys that each attends to in a step of its own: all positions up to its own."""
        return self.position + 1

    @cached_property
    def float_keys(self) -> Floats:
        """float64 [tokens] the same, whose products are several times as fast, and exact below 2⁵³."""
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


@dataclass(frozen=True)
class Schedule:
    """One schedule.

    ``admit(point, trail, first, length)`` what the token after ``trail[:length]`` may take. ``trail``: depths of a
                    sequence's tokens, oldest first; those before index ``first`` are its prompt.
    ``flow``        opens the flow of one step.
    ``why``         why a depth it does not admit is wrong, as messages end.
    ``asked(point, decided)`` bool [tokens]: whether the rule is asked about the tokens of these indices [tokens].
    ``ran(places, depth, layer, ceiling)`` what ``layer`` ran for tokens of ``depth`` [tokens], fed one by one. It
                    depends on who went as deep, and on whether ``layer`` lies below, at or above the ceiling.
    ``counted(places, depth, histogram, ceiling)`` the same of all layers, added up over tokens, without a look at each
                    of them in every layer. ``histogram`` int64 [L + 1]: tokens of each depth. Equality is a law.
    ``fills``       which of ``record.FILLS`` its K/V-only passes are.
    ``settle(point, depth)`` turns first fires int16 [longest, sequences], rows being decided tokens from each
                    sequence's first, into depths, in place: exact where the state of every token at its depth is the
                    full model's. None where only decoding knows the depths; then ``unreplayable`` says why.
    ``never_rises`` K/V above a row's cap are never asked for again: a commit frees them.
    ``deepens``     tokens that stopped keep their state, and may be taken up to any depth again (``Session.deepen``).
    ``ruleless``    the place of a token decides its depth, whatever fires.
    ``by_prefix``   the tokens of a chunk that still run after a layer are a prefix of it, and the rule decides of each
                    how far: depths can be read off in one pass (``decoding.step``).
    """

    name: ScheduleName
    admit: Callable[[OperatingPoint, Sequence[int], int, int], Admission]
    flow: Callable[[FlowStart], Flow]
    why: str
    asked: Callable[[OperatingPoint, Ints], Bools]
    ran: Callable[[TokenPositions, Ints, int, int], LayerRun]
    counted: Callable[[TokenPositions, Ints, Ints, int], LayerTotals]
    settle: DepthResolver | None
    unreplayable: str = ""
    fills: str = "exact"
    never_rises: bool = False
    deepens: bool = False
    ruleless: bool = False
    by_prefix: bool = False

    def in_replay(self) -> DepthResolver:
        """How fires become depths where it is replayed.

        Raises:
            BadArgument: it cannot be.
        """
        if self.settle is None:
            raise BadArgument("point.schedule", self.name, "an exact schedule", self.unreplayable)
        return self.settle


def asks_every_token(point: OperatingPoint, decided: Ints) -> Bools:
    """The rule is asked about all of them."""
    return np.ones(len(decided), dtype=np.bool_)


def layer_run_once(places: TokenPositions, depth: Ints, layer: int, ceiling: int) -> LayerRun:
    """A token runs a layer on its own way up, against the keys of all positions up to its own, or never."""
    return LayerRun((depth >= layer) * places.keys)


def layer_totals_once(places: TokenPositions, depth: Ints, histogram: Ints, ceiling: int) -> LayerTotals:
    """``layer_run_once``, in each stretch of layers to which the same tokens go."""
    tokens = tokens_reaching(histogram)
    context = (tokens == len(depth)) * places.keys_before[-1]
    for layers, deep in layer_groups(depth, histogram):
        context[layers] = int(places.float_keys @ deep)
    return LayerTotals(tokens, context)


def tokens_reaching(histogram: Ints) -> Ints:
    """int64 [L] how many tokens go to each layer, or past it."""
    sums: Ints = histogram[:0:-1].cumsum()[::-1]
    return sums


def layer_groups(depth: Ints, histogram: Ints) -> Iterator[tuple[slice, Bools]]:
    """Layers to which the same tokens go, not all of them, but some; and bool [tokens] which those are."""
    small = depth.astype(np.int16)  # compared in a third of the time
    for below, top in itertools.pairwise(np.flatnonzero(histogram).tolist()):
        yield slice(below, top), small >= top
