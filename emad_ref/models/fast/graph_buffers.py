"""K/V buffers at fixed addresses: a pool that lends them to one cache at a time, and the cache over lent buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.kv_cache import KVCache, LayerKVCache, RunningRows, write_kv_entries
from emad_ref.record import Ints

SMALLEST_BUCKET = 64  # positions of the smallest buffers, and keys of the smallest bucket
MAX_GRAPHS = 256  # most graphs over one set of buffers: each takes memory; audits that force depths need many, once
MAX_IDLE = 4  # idle buffers in a pool; the oldest are dropped first


def bucket_size(positions: int) -> int:
    """The smallest power of two ≥ ``positions``, at least ``SMALLEST_BUCKET``."""
    return max(SMALLEST_BUCKET, 1 << (positions - 1).bit_length())


@dataclass(frozen=True)
class GraphBufferSpec:
    """Sizes of one model's K and V and of its states: ``layers``, ``heads`` of keys, their ``width``; ``hidden`` D."""

    layers: int
    heads: int
    width: int
    hidden: int
    dtype: torch.dtype
    device: torch.device


class StepInputBuffers:
    """Inputs of a step of ``rows`` rows besides K/V and weights, at fixed addresses.

    ``hidden`` [rows, 1, D]; ``positions``, ``places`` int64 [rows]: each row's position, and its row in the buffers.
    """

    def __init__(self, sizes: GraphBufferSpec, rows: int):
        with torch.inference_mode(False), torch.no_grad():
            self.hidden = torch.zeros(rows, 1, sizes.hidden, dtype=sizes.dtype, device=sizes.device)
            self._both = torch.zeros(2, rows, dtype=torch.int64, device=sizes.device)
        self.positions, self.places = self._both.unbind()
        self._rows = rows
        self._last: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def copy_inputs(self, hidden: Tensor, running: RunningRows) -> None:
        """Copy states and the first running rows; rows and positions only if they changed."""
        signature = running.starts[: self._rows], running.rows[: self._rows]
        if self._last != signature:
            self._both.copy_(torch.tensor(signature), non_blocking=True)
            self._last = signature
        self.hidden.copy_(hidden[: self._rows])


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """One graph: ``replay`` returns its result; ``read`` holds the addresses of the weights that it reads.

    ``kept`` holds its other inputs alive: a freed tensor's address may be reused.
    """

    replay: Callable[[], Tensor]
    read: tuple[int, ...]
    kept: object


class KVBuffers:
    """K and V of ``rows`` sequences and ``capacity`` positions, [rows, heads, capacity, width] for each layer.

    ``graphs``: (first, last, rows, bucket) → graph captured over these buffers.
    """

    def __init__(self, sizes: GraphBufferSpec, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        shape = (2, sizes.layers, rows, sizes.heads, capacity, sizes.width)
        # zeros, not empty: masked slots are read. Inference-mode tensors could not be written outside of it
        with torch.inference_mode(False), torch.no_grad():
            self._all = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        keys, values = self._all.unbind()
        self.keys, self.values = keys.unbind(), values.unbind()
        self.graphs: dict[tuple[int, int, int, int], CapturedGraph] = {}
        self._sizes = sizes
        self._inputs: dict[int, StepInputBuffers] = {}

    def store_graph(self, where: tuple[int, int, int, int], captured: CapturedGraph) -> None:
        """Store a graph, and drop the oldest beyond the limit."""
        self.graphs[where] = captured
        while len(self.graphs) > MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]

    def step_input_buffers(self, rows: int) -> StepInputBuffers:
        """Inputs of steps of ``rows`` rows."""
        if rows not in self._inputs:
            self._inputs[rows] = StepInputBuffers(self._sizes, rows)
        return self._inputs[rows]

    def zero_all_entries(self) -> None:
        """Zero all entries: under a mask, 0 × NaN of an earlier session would still be NaN."""
        self._all.zero_()

    def copy_rows_from(self, other: KVBuffers, places: Sequence[int]) -> None:
        """Copy rows at ``places`` of ``other``, in order, as far as both have room."""
        shared = min(self.capacity, other.capacity)
        rows = torch.tensor(places, device=self._all.device)
        self._all[..., :shared, :].copy_(other._all[:, :, rows, :, :shared])


class BufferPool:
    """Idle buffers of one model, lent by rows and positions."""

    def __init__(self, sizes: GraphBufferSpec):
        self._sizes = sizes
        self._idle: list[KVBuffers] = []  # the oldest first

    def lend_buffers(self, rows: int, positions: int) -> KVBuffers:
        """Empty buffers for ``rows`` rows and at least ``positions`` positions."""
        capacity = bucket_size(positions)
        for buffers in reversed(self._idle):
            if (buffers.rows, buffers.capacity) == (rows, capacity):
                self._idle.remove(buffers)
                buffers.zero_all_entries()
                return buffers
        try:
            return KVBuffers(self._sizes, rows, capacity)
        except torch.OutOfMemoryError:
            if not self._idle:
                raise
            self._idle.clear()  # drop them with their graphs: idle buffers must not keep memory from a session
            return KVBuffers(self._sizes, rows, capacity)

    def take_back(self, buffers: KVBuffers) -> None:
        """Return ``buffers`` to the pool."""
        self._idle.append(buffers)
        del self._idle[:-MAX_IDLE]


class BufferLease:
    """The buffers leased to one cache: none until it writes, and larger ones when it outgrows them."""

    def __init__(self, pool: BufferPool, rows: int, capacity: int):
        self.pool, self.rows = pool, rows
        self._capacity = capacity
        self._held: KVBuffers | None = None

    def buffers(self, positions: int) -> KVBuffers:
        """The buffers, with room for at least ``positions``; growing copies K and V."""
        current = self._held
        if current is None or current.capacity < positions:
            return self._move(range(self.rows), max(positions, self._capacity))
        return current

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, renumbered, in smaller buffers."""
        self.rows = len(rows)
        if self._held is not None:
            self._move(rows, self._held.capacity)

    def return_buffers(self) -> None:
        """Return the buffers."""
        if self._held is not None:
            self.pool.take_back(self._held)
            self._held = None

    def _move(self, rows: Sequence[int], positions: int) -> KVBuffers:
        buffers = self.pool.lend_buffers(len(rows), positions)
        if self._held is not None:
            buffers.copy_rows_from(self._held, rows)
        self.return_buffers()
        self._held = buffers
        return buffers


class StaticLayerKVCache(LayerKVCache):
    """Keys and values of one layer in lent buffers."""

    def __init__(self, number: int, rows: int, capacity: int, lease: BufferLease):
        super().__init__(number, rows, capacity)
        self._lease = lease

    def row_kv(self, row: int) -> tuple[Tensor, Tensor]:
        """See ``LayerKVCache.row_kv``."""
        length = self._length[self._rows.index(row)]
        if not length:
            raise BadArgument("row", row, "a row with entries", "nothing ran here yet")
        buffers, layer = self._lease.buffers(length), self._number - 1
        return buffers.keys[layer][row, :, :length], buffers.values[layer][row, :, :length]

    def write(self, keys: Tensor, values: Tensor, running: RunningRows) -> tuple[Tensor, Tensor]:
        """See ``LayerKVCache.write``; for forwards without capture."""
        buffers, layer = self._lease.buffers(running.keys), self._number - 1
        places = None if len(running.rows) == buffers.rows else torch.tensor(running.rows, device=keys.device)
        attended = write_kv_entries(buffers.keys[layer], buffers.values[layer], keys, values, running, places)
        self._hold(running)
        return attended

    def mark_written(self, running: RunningRows) -> None:
        """Record that a graph has written the rows' K and V."""
        self._hold(running)

    def keep_rows(self, rows: Sequence[int], numbers: dict[int, int]) -> None:
        """See ``LayerKVCache.keep_rows``; the cache handles the buffers."""
        places = [place for place, row in enumerate(self._rows) if row in set(rows)]
        self._length = tuple(self._length[place] for place in places)
        self._rows = tuple(numbers[self._rows[place]] for place in places)


class StaticKVCache(KVCache):
    """A cache whose buffers come from ``pool`` and return to it when the cache is collected."""

    def __init__(self, pool: BufferPool, layers: int, rows: int, capacity: int):
        super().__init__(layers, rows, capacity)
        self.lease = lease = BufferLease(pool, rows, capacity)
        self._static = [StaticLayerKVCache(i + 1, rows, capacity, lease) for i in range(layers)]
        self.layers = [*self._static]
        weakref.finalize(
            self, lease.return_buffers
        )  # layers refer to the lease and not to the cache, so only its user keeps the cache alive

    def has_original_layers(self, first: int, last: int) -> bool:
        """Whether layers first+1 … last are still the original ones, since decoders may replace them."""
        return self.layers[first:last] == self._static[first:last]

    def mark_written(self, first: int, last: int, running: RunningRows) -> None:
        """Record that a graph has written K and V of layers first+1 … last."""
        for layer in self._static[first:last]:
            layer.mark_written(running)

    def drop_rows(self, rows: Ints) -> None:
        """See ``KVCache.drop_rows``."""
        remaining = np.delete(np.arange(self.rows), np.atleast_1d(rows)).tolist()
        super().drop_rows(rows)
        self.lease.keep_rows(remaining)
