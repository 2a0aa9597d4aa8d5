"""K/V that stays where it is: buffers for some rows and positions, the inputs of steps over them, and their graphs.

A graph is bound to addresses, and sessions come and go. So buffers stand on a *shelf* and are lent to one cache at a
time, which gets them empty: two open sessions have two arenas, and the next one finds the graphs of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emad_ref.models.cache import Writing

LEAST = 64  # positions of the smallest buffers, and keys of the smallest bucket
MOST_GRAPHS = 256  # of one arena: each takes memory; audits that force any depth at any row meet many, and each once
IDLE = 4  # arenas that wait on a shelf; the one that has waited longest goes first


def bucket(positions: int) -> int:
    """The smallest power of two that holds so many, at least ``LEAST``."""
    return max(LEAST, 1 << (positions - 1).bit_length())


@dataclass(frozen=True)
class Sizes:
    """Of one model's K and V, and of its states: ``layers``, ``heads`` of keys, their ``width``; ``hidden`` D."""

    layers: int
    heads: int
    width: int
    hidden: int
    dtype: torch.dtype
    device: torch.device


class Inputs:
    """What a step of so many rows reads besides K/V and weights, at addresses of its own.

    ``hidden`` [rows, 1, D]; ``positions``, ``places`` int64 [rows]: each row's position, and its place in the buffers.
    """

    def __init__(self, sizes: Sizes, rows: int):
        with torch.inference_mode(False), torch.no_grad():
            self.hidden = torch.zeros(rows, 1, sizes.hidden, dtype=sizes.dtype, device=sizes.device)
            self._both = torch.zeros(2, rows, dtype=torch.int64, device=sizes.device)
        self.positions, self.places = self._both.unbind()
        self._rows = rows
        self._said: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def take(self, hidden: Tensor, frame: Writing) -> None:
        """The first rows of a frame, and of their states: one small transfer, none where they were said already."""
        said = frame.starts[: self._rows], frame.rows[: self._rows]
        if self._said != said:
            self._both.copy_(torch.tensor(said), non_blocking=True)
            self._said = said
        self.hidden.copy_(hidden[: self._rows])


@dataclass(frozen=True, eq=False)
class Captured:
    """One graph: ``replay`` gives its result; ``read`` are the addresses of the weights that it reads.

    ``kept`` holds what else it reads: at the address of a tensor that is gone lies another one.
    """

    replay: Callable[[], Tensor]
    read: tuple[int, ...]
    kept: object


class Arena:
    """K and V of ``rows`` sequences and ``capacity`` positions, [rows, heads, capacity, width] for each layer.

    ``graphs``: (first, last, rows, bucket) → what was captured over these buffers.
    """

    def __init__(self, sizes: Sizes, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        shape = (2, sizes.layers, rows, sizes.heads, capacity, sizes.width)
        # zeros, not empty: masked slots are read. Tensors of inference mode could not be written to outside it
        with torch.inference_mode(False), torch.no_grad():
            self._all = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        keys, values = self._all.unbind()
        self.keys, self.values = keys.unbind(), values.unbind()
        self.graphs: dict[tuple[int, int, int, int], Captured] = {}
        self._sizes = sizes
        self._inputs: dict[int, Inputs] = {}

    def keep(self, where: tuple[int, int, int, int], captured: Captured) -> None:
        """Hold a graph, and let go of those captured longest ago where there are too many."""
        self.graphs[where] = captured
        while len(self.graphs) > MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]

    def inputs(self, rows: int) -> Inputs:
        """Those of steps of so many rows."""
        if rows not in self._inputs:
            self._inputs[rows] = Inputs(self._sizes, rows)
        return self._inputs[rows]

    def empty(self) -> None:
        """Whatever a session left is gone: 0 × NaN would be NaN in the next one, though a mask hides it."""
        self._all.zero_()

    def take(self, other: Arena, places: Sequence[int]) -> None:
        """Rows at ``places`` of ``other``, in order, as far as both have room."""
        held = min(self.capacity, other.capacity)
        rows = torch.tensor(places, device=self._all.device)
        self._all[..., :held, :].copy_(other._all[:, :, rows, :, :held])


class Shelf:
    """Arenas of one model, lent by rows and positions."""

    def __init__(self, sizes: Sizes):
        self._sizes = sizes
        self._idle: list[Arena] = []  # the longest waiting first

    def lend(self, rows: int, positions: int) -> Arena:
        """An empty one for so many ``rows``, and ``positions`` at least."""
        capacity = bucket(positions)
        for arena in reversed(self._idle):
            if (arena.rows, arena.capacity) == (rows, capacity):
                self._idle.remove(arena)
                arena.empty()
                return arena
        try:
            return Arena(self._sizes, rows, capacity)
        except torch.OutOfMemoryError:
            if not self._idle:
                raise
            self._idle.clear()  # and their graphs: what waits must not keep a session from its buffers
            return Arena(self._sizes, rows, capacity)

    def take_back(self, arena: Arena) -> None:
        """It may be lent again."""
        self._idle.append(arena)
        del self._idle[:-IDLE]


class Loan:
    """What one cache has borrowed: nothing until it writes, and another arena when it outgrows the one it has."""

    def __init__(self, shelf: Shelf, rows: int, capacity: int):
        self.shelf, self.rows = shelf, rows
        self._capacity = capacity
        self._held: Arena | None = None

    def arena(self, positions: int) -> Arena:
        """With room for ``positions`` at least, K and V of a smaller one included."""
        held = self._held
        if held is None or held.capacity < positions:
            return self._move(range(self.rows), max(positions, self._capacity))
        return held

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows from now on, by new numbers: in an arena of as many."""
        self.rows = len(rows)
        if self._held is not None:
            self._move(rows, self._held.capacity)

    def end(self) -> None:
        """Give back what is held."""
        if self._held is not None:
            self.shelf.take_back(self._held)
            self._held = None

    def _move(self, rows: Sequence[int], positions: int) -> Arena:
        arena = self.shelf.lend(len(rows), positions)
        if self._held is not None:
            arena.take(self._held, rows)
        self.end()
        self._held = arena
        return arena
