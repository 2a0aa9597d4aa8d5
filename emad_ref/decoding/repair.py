"""What becomes of rows that stop early, and of the K/V they leave unwritten above their depth; one flow per schedule.

``Leave``    monotone, positional: the row never returns to the layers above, so nothing is owed.
``Eager``    free_eager: stopped rows go on to write K and V of the layers above (the last by a K/V-only pass).
             Exact, and no gain by construction.
``Copying``  copying (CALM): the state at the exit passes through norm and K/V projections of every layer above. Later
             tokens attend to keys of a state that never ran there: approximate.
``Deferred`` free_deferred (FREE), chunked: stopped rows leave; their states wait, and run through a layer when a later
             token of the same row needs it, in one chunk with that token. Exact; compute is moved, not saved, but for
             what no later token ever asked for.

A flow lives for one step. It holds the states of the running rows, runs blocks, and counts what it runs.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from emad_ref.models.cache import Cache
from emad_ref.models.stepper import Frame, Stepper
from emad_ref.point import OperatingPoint
from emad_ref.record import FILLS, Ints, Work

EXACT, COPIED = FILLS.index("exact"), FILLS.index("copied")


def count_blocks(work: Work, first: int, last: int, rows: int, queries: int, keys: int) -> None:
    """Charge layers first+1 … last with ``rows`` × ``queries`` tokens against ``keys`` keys each."""
    work.tokens[first:last] += rows * queries
    work.context[first:last] += rows * queries * keys


class Owed:
    """States of tokens that stopped early and may have to go on: per session row, position → state [D] so far."""

    def __init__(self, rows: int):
        self.waiting: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def truncate(self, length: Ints) -> None:
        """Forget tokens from ``length`` [rows] on."""
        for row, kept in enumerate(length.tolist()):
            self.waiting[row] = {position: state for position, state in self.waiting[row].items() if position < kept}

    def drop(self, kept: list[int]) -> None:
        """Keep only these rows, in order."""
        self.waiting = [self.waiting[row] for row in kept]


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

    def __init__(
        self, stepper: Stepper, ceiling: int, hidden: Tensor, frame: Frame, cache: Cache, work: Work, owed: Owed
    ):
        self.stepper, self.ceiling, self.cache, self.work = stepper, ceiling, cache, work
        self.hidden, self.frame, self.owed = hidden, frame, owed
        self.running, self.at = np.arange(len(hidden)), 0  # batch rows that have not stopped; layers run so far

    def run(self, first: int, last: int) -> Tensor:
        self.hidden, self.at = self.stepper.run(self.hidden, first, last, self.frame, self.cache), last
        count_blocks(self.work, first, last, len(self.hidden), self.frame.queries, self.frame.keys)
        return self.hidden

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        if len(going) and len(stopped):
            self.hidden, self.frame = self.hidden[_index(going, self.hidden)], self.frame.take(going)
        self.running = self.running[going]

    def finish(self) -> None:
        """Nothing is owed."""


class Eager(Leave):
    """All rows run on; ``running`` are those still asked about."""

    def run(self, first: int, last: int) -> Tensor:
        super().run(first, last)
        return self.hidden if len(self.running) == len(self.hidden) else self.hidden[_index(self.running, self.hidden)]

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        self.running = self.running[going]

    def finish(self) -> None:
        if self.at == self.ceiling:
            return
        super().run(self.at, self.ceiling - 1)
        self.stepper.fill(self.hidden, self.ceiling, self.frame, self.cache)
        self.work.fills[EXACT, self.ceiling - 1] += self.hidden.shape[:2].numel()


class Copying(Leave):
    """The exit state stands in for the states of all layers above."""

    def __init__(
        self, stepper: Stepper, ceiling: int, hidden: Tensor, frame: Frame, cache: Cache, work: Work, owed: Owed
    ):
        super().__init__(stepper, ceiling, hidden, frame, cache, work, owed)
        self.whole, self.exits, self.depth = frame, hidden.clone(), np.zeros(len(hidden), dtype=np.int64)

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        chosen = self.running[stopped]
        self.depth[chosen] = layer
        self.exits[_index(chosen, self.exits)] = self.hidden[_index(stopped, self.hidden)]
        super().stop(stopped, going, layer)

    def finish(self) -> None:
        for layer in range(int(self.depth.min()) + 1, self.ceiling + 1):
            rows = np.flatnonzero(self.depth < layer)
            states = self.exits[_index(rows, self.exits)]
            self.stepper.fill(states, layer, self.whole.take(rows), self.cache)
            self.work.fills[COPIED, layer - 1] += states.shape[:2].numel()


class Deferred(Leave):
    """Rows leave, their states wait in ``owed``; a deeper token takes them along, layer by layer."""

    def run(self, first: int, last: int) -> Tensor:
        for layer in range(first + 1, last + 1):
            held = dict(zip(self.cache.layers[layer - 1].rows, self.cache.layers[layer - 1].length, strict=True))
            lacking = [start - int(held[row]) for row, start in zip(self.frame.rows, self.frame.starts, strict=True)]
            if any(lacking):
                self._run_with_backlog(layer, lacking)
            else:
                super().run(layer - 1, layer)
        return self.hidden

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        if layer < self.ceiling:
            for i in stopped.tolist():
                self._wait(self.frame.rows[i], self.frame.starts[i], self.hidden[i])
        super().stop(stopped, going, layer)

    def _wait(self, row: int, position: int, states: Tensor) -> None:
        self.owed.waiting[row] |= {position + i: state.clone() for i, state in enumerate(states)}

    def _run_with_backlog(self, layer: int, lacking: list[int]) -> None:
        """One layer over each row's waiting states and its current ones, padded on the right to the longest."""
        rows, starts, queries = self.frame.rows, self.frame.starts, self.frame.queries
        chunks = []
        for row, start, lacks, current in zip(rows, starts, lacking, self.hidden, strict=True):
            waiting = [self.owed.waiting[row][position] for position in range(start - lacks, start)]
            chunks.append(torch.stack([*waiting, *current]))
        padded = torch.nn.utils.rnn.pad_sequence(chunks, batch_first=True)
        first = np.array(starts) - np.array(lacking)
        frame = self.stepper.frame(
            first[:, None] + np.arange(padded.shape[1]),
            self.cache,
            rows=np.array(rows),
            lengths=np.array(lacking) + queries,
        )
        padded = self.stepper.run(padded, layer - 1, layer, frame, self.cache)
        count_blocks(self.work, layer - 1, layer, len(rows), padded.shape[1], frame.keys)
        for row, start, lacks, states in zip(rows, starts, lacking, padded, strict=True):
            if layer == self.ceiling:
                for position in range(start - lacks, start):
                    del self.owed.waiting[row][position]
            else:
                self._wait(row, start - lacks, states[:lacks])
        self.hidden = torch.stack([s[lacks : lacks + queries] for s, lacks in zip(padded, lacking, strict=True)])


FLOWS: dict[str, type[Leave]] = {
    "monotone": Leave,
    "positional": Leave,
    "free_eager": Eager,
    "copying": Copying,
    "free_deferred": Deferred,
    "chunked": Deferred,
}


def flow_of(
    stepper: Stepper, point: OperatingPoint, hidden: Tensor, frame: Frame, cache: Cache, work: Work, owed: Owed
) -> Flow:
    """The flow of one step that starts from ``hidden`` [rows, n, D]; what it runs is counted in ``work``."""
    return FLOWS[point.schedule](stepper, point.ceiling, hidden, frame, cache, work, owed)


def _index(rows: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)
