"""K/V buffers at fixed addresses: a pool that lends them to one cache at a time, and the cache over lent buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.kv_cache import CacheWrite, KVCache, LayerKVCache, write_entries
from emad_ref.record import Ints

SMALLEST_BUCKET = 64  # positions of the smallest buffers, and keys of the smallest bucket
MAX_GRAPHS = 256  # of one arena: each takes memory; audits that force any depth at any row meet many, and each once
MAX_IDLE = 4  # arenas that wait on a shelf; the one that has waited longest goes first


def bucket_size(positions: int) -> int:
    """The smallest power of two that holds so many, at least ``LEAST``."""
    return max(SMALLEST_BUCKET, 1 << (positions - 1).bit_length())


@dataclass(frozen=True)
class BufferShape:
    """Of one model's K and V, and of its states: ``layers``, ``heads`` of keys, their ``width``; ``hidden`` D."""

    layers: int
    heads: int
    width: int
    hidden: int
    dtype: torch.dtype
    device: torch.device


class StepBuffers:
    """What a step of so many rows reads besides K/V and weights, at addresses of its own.

    ``hidden`` [rows, 1, D]; ``positions``, ``places`` int64 [rows]: each row's position, and its place in the buffers.
    """

    def __init__(self, sizes: BufferShape, rows: int):
        with torch.inference_mode(False), torch.no_grad():
            self.hidden = torch.zeros(rows, 1, sizes.hidden, dtype=sizes.dtype, device=sizes.device)
            self._both = torch.zeros(2, rows, dtype=torch.int64, device=sizes.device)
        self.positions, self.places = self._both.unbind()
        self._rows = rows
        self._said: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def take(self, hidden: Tensor, frame: CacheWrite) -> None:
        """The first rows of a frame, and of their states: one small transfer, none where they were said already."""
        said = frame.starts[: self._rows], frame.rows[: self._rows]
        if self._said != said:
            self._both.copy_(torch.tensor(said), non_blocking=True)
            self._said = said
        self.hidden.copy_(hidden[: self._rows])


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """One graph: ``replay`` gives its result; ``read`` are the addresses of the weights that it reads.

    ``kept`` holds what else it reads: at the address of a tensor that is gone lies another one.
    """

    replay: Callable[[], Tensor]
    read: tuple[int, ...]
    kept: object


class KVBuffers:
    """K and V of ``rows`` sequences and ``capacity`` positions, [rows, heads, capacity, width] for each layer.

    ``graphs``: (first, last, rows, bucket) → what was captured over these buffers.
    """

    def __init__(self, sizes: BufferShape, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        shape = (2, sizes.layers, rows, sizes.heads, capacity, sizes.width)
        # zeros, not empty: masked slots are read. Tensors of inference mode could not be written to outside it
        with torch.inference_mode(False), torch.no_grad():
            self._all = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        keys, values = self._all.unbind()
        self.keys, self.values = keys.unbind(), values.unbind()
        self.graphs: dict[tuple[int, int, int, int], CapturedGraph] = {}
        self._sizes = sizes
        self._inputs: dict[int, StepBuffers] = {}

    def keep(self, where: tuple[int, int, int, int], captured: CapturedGraph) -> None:
        """Hold a graph, and let go of those captured longest ago where there are too many."""
        self.graphs[where] = captured
        while len(self.graphs) > MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]

    def inputs(self, rows: int) -> StepBuffers:
        """Those of steps of so many rows."""
        if rows not in self._inputs:
            self._inputs[rows] = StepBuffers(self._sizes, rows)
        return self._inputs[rows]

    def empty(self) -> None:
        """Whatever a session left is gone: 0 × NaN would be NaN in the next one, though a mask hides it."""
        self._all.zero_()

    def take(self, other: KVBuffers, places: Sequence[int]) -> None:
        """Rows at ``places`` of ``other``, in order, as far as both have room."""
        held = min(self.capacity, other.capacity)
        rows = torch.tensor(places, device=self._all.device)
        self._all[..., :held, :].copy_(other._all[:, :, rows, :, :held])


class BufferPool:
    """Arenas of one model, lent by rows and positions."""

    def __init__(self, sizes: BufferShape):
        self._sizes = sizes
        self._idle: list[KVBuffers] = []  # the longest waiting first

    def lend(self, rows: int, positions: int) -> KVBuffers:
        """An empty one for so many ``rows``, and ``positions`` at least."""
        capacity = bucket_size(positions)
        for arena in reversed(self._idle):
            if (arena.rows, arena.capacity) == (rows, capacity):
                self._idle.remove(arena)
                arena.empty()
                return arena
        try:
            return KVBuffers(self._sizes, rows, capacity)
        except torch.OutOfMemoryError:
            if not self._idle:
                raise
            self._idle.clear()  # and their graphs: what waits must not keep a session from its buffers
            return KVBuffers(self._sizes, rows, capacity)

    def take_back(self, arena: KVBuffers) -> None:
        """It may be lent again."""
        self._idle.append(arena)
        del self._idle[:-MAX_IDLE]


class BufferLease:
    """What one cache has borrowed: nothing until it writes, and another arena when it outgrows the one it has."""

    def __init__(self, shelf: BufferPool, rows: int, capacity: int):
        self.shelf, self.rows = shelf, rows
        self._capacity = capacity
        self._held: KVBuffers | None = None

    def arena(self, positions: int) -> KVBuffers:
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

    def _move(self, rows: Sequence[int], positions: int) -> KVBuffers:
        arena = self.shelf.lend(len(rows), positions)
        if self._held is not None:
            arena.take(self._held, rows)
        self.end()
        self._held = arena
        return arena


class StaticLayerCache(LayerKVCache):
    """Keys and values of one layer in borrowed buffers."""

    def __init__(self, number: int, rows: int, capacity: int, loan: BufferLease):
        super().__init__(number, rows, capacity)
        self._loan = loan

    def entries(self, row: int) -> tuple[Tensor, Tensor]:
        """See ``LayerKVCache.entries``."""
        held = self._length[self._rows.index(row)]
        if not held:
            raise BadArgument("row", row, "a row with entries", "nothing ran here yet")
        arena, layer = self._loan.arena(held), self._number - 1
        return arena.keys[layer][row, :, :held], arena.values[layer][row, :, :held]

    def write(self, keys: Tensor, values: Tensor, frame: CacheWrite) -> tuple[Tensor, Tensor]:
        """See ``LayerKVCache.write``: for forwards that are not captured."""
        arena, layer = self._loan.arena(frame.keys), self._number - 1
        places = None if len(frame.rows) == arena.rows else torch.tensor(frame.rows, device=keys.device)
        seen = write_entries(arena.keys[layer], arena.values[layer], keys, values, frame, places)
        self._hold(frame)
        return seen

    def hold(self, frame: CacheWrite) -> None:
        """A graph has written the frame's K and V."""
        self._hold(frame)

    def keep(self, rows: Sequence[int], numbers: dict[int, int]) -> None:
        """See ``LayerKVCache.keep``; buffers are the cache's matter."""
        places = [place for place, row in enumerate(self._rows) if row in set(rows)]
        self._length = tuple(self._length[place] for place in places)
        self._rows = tuple(numbers[self._rows[place]] for place in places)


class StaticKVCache(KVCache):
    """A cache whose buffers come from ``shelf`` and go back to it with the cache."""

    def __init__(self, shelf: BufferPool, layers: int, rows: int, capacity: int):
        super().__init__(layers, rows, capacity)
        self.loan = loan = BufferLease(shelf, rows, capacity)
        self._static = [StaticLayerCache(i + 1, rows, capacity, loan) for i in range(layers)]
        self.layers = [*self._static]
        weakref.finalize(self, loan.end)  # layers hold the loan, not the cache: nothing keeps it alive but its user

    def holds(self, first: int, last: int) -> bool:
        """Whether layers first+1 … last are still those that it was made with: decoders may put others there."""
        return self.layers[first:last] == self._static[first:last]

    def hold(self, first: int, last: int, frame: CacheWrite) -> None:
        """A graph has written K and V of layers first+1 … last."""
        for layer in self._static[first:last]:
            layer.hold(frame)

    def drop(self, rows: Ints) -> None:
        """See ``KVCache.drop``."""
        kept = np.delete(np.arange(self.rows), np.atleast_1d(rows)).tolist()
        super().drop(rows)
        self.loan.keep(kept)
