"""Rows of one decoding step on their way up: what every flow is, and the one that owes nothing.

A flow lives for one step. It holds the states of the running rows, runs blocks, and counts what it runs. What it does
about K/V that rows leave unwritten above their depth is its schedule's matter: ``Leave`` here is the flow of schedules
under which a row never returns to the layers above (``monotone``, ``positional``), and the base of the others.

``Store`` is what a session keeps from step to step: K/V, the states of tokens that may have to go on, and the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from emad_ref.models.cache import Cache
from emad_ref.models.stepper import Frame, Stepper
from emad_ref.readout.states import StateTranslators
from emad_ref.record import Ints, Work


class Owed:
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
class Store:
    """What a session keeps: ``cache`` of its K/V, ``owed`` states of its tokens, ``work`` executed for its tokens."""

    stepper: Stepper
    cache: Cache
    owed: Owed
    work: Work


class Start(NamedTuple):
    """Where a flow sets out: states ``hidden`` [rows, n, D] before layer 1, their frame, and the point's ceiling.

    ``translators``: the point's, of a schedule that has them.
    """

    store: Store
    ceiling: int
    hidden: Tensor
    frame: Frame
    translators: StateTranslators | None


class Flow(Protocol):
    """States of one step on their way up."""

    def run(self, first: int, last: int) -> Tensor:
        """Execute layers first+1 … last for the running rows; their states [running, n, D]."""

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        """Rows ``stopped`` (indices into the running ones) ended after ``layer``; ``going`` are the others."""

    def finish(self) -> None:
        """All rows have stopped: settle what this step owes at once."""


class Leave:
    """Rows only leave; compact them."""

    def __init__(self, start: Start):
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
