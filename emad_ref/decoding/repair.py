"""What becomes of rows that stop early, and of the K/V they leave unwritten above their depth; one flow per schedule.

``Leave``    monotone, positional: the row never returns to the layers above, so nothing is owed.
``Eager``    free_eager: stopped rows go on to write K and V of the layers above (the last by a K/V-only pass).
             Exact, and no gain by construction.
``Copying``  copying (CALM): the state at the exit passes through norm and K/V projections of every layer above. Later
             tokens attend to keys of a state that never ran there: approximate.
``Deferred`` free_deferred (FREE), chunked: stopped rows leave; their states wait, and run through a layer when a later
             token of the same row needs it, in one chunk with that token. Exact; compute is moved, not saved, but for
             what no later token ever asked for. What waits can also be asked for itself: ``settle`` takes it to the
             ceiling, where its logits are the full model's (self-speculation verifies by this).

A flow lives for one step. It holds the states of the running rows, runs blocks, and counts what it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        for below, top, held in _stretches(self.cache, first, last, self.frame.rows):
            if held == self.frame.starts:
                super().run(below, top)
            else:
                self._run_with_backlog(below, top, held)
        return self.hidden

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        if layer < self.ceiling:
            for i in stopped.tolist():
                self.owed.put(self.frame.rows[i], self.frame.starts[i], self.hidden[i])
        super().stop(stopped, going, layer)

    def _run_with_backlog(self, first: int, last: int, held: tuple[int, ...]) -> None:
        """Layers that lack earlier tokens of some row, over each row's waiting states and its current ones."""
        rows, starts = self.frame.rows, self.frame.starts
        chunks = [
            torch.stack([*self.owed.between(row, begin, start), *current])
            for row, begin, start, current in zip(rows, held, starts, self.hidden, strict=True)
        ]
        states = _run_ragged(self.stepper, chunks, rows, held, first, last, self.cache, self.work)
        for row, begin, start, higher in zip(rows, held, starts, states, strict=True):
            if last == self.ceiling:
                self.owed.forget(row, begin, start)
            else:
                self.owed.put(row, begin, higher[: start - begin])
        self.hidden = torch.stack([higher[-self.frame.queries :] for higher in states])


def settle(stepper: Stepper, ceiling: int, first: Ints, end: Ints, cache: Cache, work: Work, owed: Owed) -> Tensor:
    """States [rows, n, D] at the ceiling of every session row's tokens from ``first`` to before ``end``, both [rows].

    All of them wait, each after a layer of its own, and so may tokens before them, which go up along with them. Each
    runs the layers it has not run, once; rows that lack fewer tokens are padded, and the padding is counted.
    """
    for below, top, held in _stretches(cache, 0, ceiling, range(len(end))):
        lacking = [row for row, begin in enumerate(held) if begin < end[row]]
        if not lacking:
            continue
        begins = [held[row] for row in lacking]
        chunks = [torch.stack(owed.between(row, held[row], int(end[row]))) for row in lacking]
        states = _run_ragged(stepper, chunks, lacking, begins, below, top, cache, work)
        for row, begin, higher in zip(lacking, begins, states, strict=True):
            owed.put(row, begin, higher)
    bounds = list(zip(first.tolist(), end.tolist(), strict=True))
    settled = torch.stack([torch.stack(owed.between(row, *span)) for row, span in enumerate(bounds)])
    for row, held in enumerate(end.tolist()):
        owed.waiting[row] = {position: state for position, state in owed.waiting[row].items() if position >= held}
    return settled


def _stretches(cache: Cache, first: int, last: int, rows: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(below, top, entries held of each of ``rows``): layers first+1 … last, those that hold as much taken together."""
    below = first
    while below < last:
        held, top = _held(cache, below + 1, rows), below + 1
        while top < last and _held(cache, top + 1, rows) == held:
            top += 1
        yield below, top, held
        below = top


def _held(cache: Cache, layer: int, rows: Sequence[int]) -> tuple[int, ...]:
    """Entries that ``layer`` holds of each of ``rows``; under a schedule that rises it serves them all."""
    length = cache.layers[layer - 1].length.tolist()
    return tuple(length[row] for row in rows)


def _run_ragged(
    stepper: Stepper,
    chunks: Sequence[Tensor],
    rows: Sequence[int],
    starts: Sequence[int],
    first: int,
    last: int,
    cache: Cache,
    work: Work,
) -> list[Tensor]:
    """Layers first+1 … last over one chunk [n_row, D] per row, each from its start on.

    Padded on the right to the longest; the padding is counted, because it is executed.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(chunks), batch_first=True)
    frame = stepper.frame(
        np.array(starts)[:, None] + np.arange(padded.shape[1]),
        cache,
        rows=np.array(rows),
        lengths=np.array([len(chunk) for chunk in chunks]),
    )
    padded = stepper.run(padded, first, last, frame, cache)
    count_blocks(work, first, last, len(rows), padded.shape[1], frame.keys)
    return [states[: len(chunk)] for states, chunk in zip(padded, chunks, strict=True)]


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
