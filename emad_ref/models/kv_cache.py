"""K/V per layer, each layer with its own rows and its own valid length per row.

Slot = position: the key of a row's token at position p lies in slot p of every layer that ran it. Nothing is padded on
the left. Slots at or above a row's length are always masked (a ragged prompt's padding, say), so a rollback by any
number of tokens per row only lowers lengths.

Under adaptive depth layers hold different numbers of tokens. A block at position p needs exactly p entries of that row
below it. Any other number would give silently wrong logits, so the cache raises ``MissingEntryError``. Under the
monotone schedule (EMAD) it never raises: that is the claim "no K/V repair".

This module knows no model, no mask and no depth rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument, EmadError
from emad_ref.record import Ints, Work


class MissingEntryError(EmadError):
    """Raised if a layer does not hold exactly the entries of all earlier positions of a row.

    ``layer`` counts from 1; ``held`` is the row's length there, None if the layer dropped the row.
    """

    def __init__(self, layer: int, row: int, position: int, held: int | None):
        self.layer, self.row, self.position, self.held = layer, row, position, held
        state = "gave this row up" if held is None else f"holds {held} entries of it"
        super().__init__(
            f"layer={layer}, but for position {position} of row {row} it must hold {position} entries and {state}; "
            "fill the skipped positions first, truncate to the position, or keep depth from rising"
        )


class CacheWrite(Protocol):
    """The cache's view of a forward's context: rows that write, their start, and their length afterwards.

    ``rows``, ``starts``, ``ends`` have one entry per row; ``start`` is the common start, None if rows differ;
    ``queries`` the width n of the chunk, padding included; ``keys`` the slots every query is executed against.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    start: int | None
    queries: int
    keys: int

    def positions_on(self, device: torch.device) -> Tensor:
        """int64 [rows, n] on ``device``."""


def write_kv_entries(
    held_keys: Tensor, held_values: Tensor, keys: Tensor, values: Tensor, context: CacheWrite, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Write [rows, kv_heads, n, head_dim] at the context's slots of two buffers; returns all keys and values.

    ``places`` int64 [rows] of the context's rows in the buffers; None if they are all of them.
    """
    if places is not None:
        # an index before and one after the slice: the result is [rows, n, kv_heads, head_dim]
        slots = context.positions_on(keys.device)
        held_keys[places[:, None], :, slots] = keys.transpose(1, 2)
        held_values[places[:, None], :, slots] = values.transpose(1, 2)
    elif context.start is not None:
        held_keys.narrow(2, context.start, context.queries).copy_(keys)
        held_values.narrow(2, context.start, context.queries).copy_(values)
    else:
        at = context.positions_on(keys.device)[:, None, :, None].expand_as(keys)
        held_keys.scatter_(2, at, keys)
        held_values.scatter_(2, at, values)
    seen_keys, seen_values = held_keys.narrow(2, 0, context.keys), held_values.narrow(2, 0, context.keys)
    return (seen_keys, seen_values) if places is None else (seen_keys[places], seen_values[places])


class LayerKVCache:
    """Keys and values of one layer, [rows, kv_heads, capacity, head_dim], for the session rows it still serves.

    They are on the device of the layer's weights.
    """

    def __init__(self, number: int, rows: int, capacity: int):
        self._number, self._capacity = number, capacity
        # tuples: the common case is one comparison with the context's, and contexts can share theirs
        self._rows: tuple[int, ...] = tuple(range(rows))
        self._length: tuple[int, ...] = (0,) * rows
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def row_ids(self) -> Ints:
        """int64 [present] session rows this layer serves, ascending."""
        return np.array(self._rows, dtype=np.int64)

    @property
    def row_lengths(self) -> Ints:
        """int64 [present] entries held per served row."""
        return np.array(self._length, dtype=np.int64)

    def row_kv(self, row: int) -> tuple[Tensor, Tensor]:
        """(keys, values), each [kv_heads, length, head_dim], of a served session row that holds at least one."""
        place = self._rows.index(row)
        if self._keys is None or self._values is None:
            raise BadArgument("row", row, "a row with entries", "nothing ran here yet")
        length = self._length[place]
        return self._keys[place, :, :length], self._values[place, :, :length]

    def require_earlier_entries(self, context: CacheWrite) -> None:
        """Raise MissingEntryError unless each row of ``context`` holds exactly the entries below its first position."""
        if self._rows == context.rows and self._length == context.starts:
            return
        lengths = dict(zip(self._rows, self._length, strict=True))
        for row, start in zip(context.rows, context.starts, strict=True):
            if lengths.get(row) != start:
                raise MissingEntryError(self._number, row, start, lengths.get(row))

    def write(self, keys: Tensor, values: Tensor, context: CacheWrite) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, n, head_dim] at the context's slots; returns the keys and values to attend over.

        These are [rows, kv_heads, context.keys, head_dim]: a view of the buffer if all served rows take part.
        """
        if self._keys is None or self._values is None or self._keys.shape[2] < context.keys:
            self._make_room(keys, context.keys)
        assert self._keys is not None
        assert self._values is not None
        places: Tensor | None = None
        if self._rows != context.rows:
            places = torch.tensor([self._rows.index(row) for row in context.rows], device=keys.device)
        attended = write_kv_entries(self._keys, self._values, keys, values, context, places)
        self._hold(context)
        return attended

    def truncate(self, length: Sequence[int]) -> None:
        """Forget entries from ``length[session row]`` on."""
        self._length = tuple(
            min(entry_count, length[row]) for row, entry_count in zip(self._rows, self._length, strict=True)
        )

    def keep_rows(self, rows: Sequence[int], numbers: dict[int, int]) -> None:
        """Serve only these session rows, renumbered."""
        places = [i for i, row in enumerate(self._rows) if row in set(rows)]
        if len(places) < len(self._rows) and self._keys is not None and self._values is not None:
            index = torch.tensor(places, dtype=torch.int64, device=self._keys.device)
            self._keys = self._keys[index] if places else None
            self._values = self._values[index] if places else None
        self._length = tuple(self._length[i] for i in places)
        self._rows = tuple(numbers[self._rows[i]] for i in places)

    def _hold(self, context: CacheWrite) -> None:
        if self._rows == context.rows:
            self._length = context.ends
        else:
            ends = dict(zip(context.rows, context.ends, strict=True))
            self._length = tuple(
                ends.get(r, entry_count) for r, entry_count in zip(self._rows, self._length, strict=True)
            )

    def _make_room(self, like: Tensor, slots: int) -> None:
        if self._keys is None or self._values is None:
            shape = (len(self._rows), like.shape[1], max(self._capacity, slots), like.shape[3])
            # zeros, not empty: masked slots are read, and NaN × 0 is NaN
            self._keys, self._values = like.new_zeros(shape), like.new_zeros(shape)
        elif self._keys.shape[2] < slots:
            self._keys, self._values = _grow(self._keys, slots), _grow(self._values, slots)


class KVCache:
    """K/V of one batch of sequences: session rows 0 … rows−1, ``layers`` layers.

    ``layers[i]`` belongs to layer i + 1. Buffers are allocated at the first write and grow by doubling.

    Raises:
        BadArgument: fewer than one layer, row or slot.
    """

    def __init__(self, layers: int, rows: int, capacity: int = 256):
        for name, value in (("layers", layers), ("rows", rows), ("capacity", capacity)):
            if value < 1:
                raise BadArgument(name, value, "at least 1")
        self.rows = rows
        self.layers = [LayerKVCache(i + 1, rows, capacity) for i in range(layers)]
        self._caps: tuple[int, ...] | None = None  # caps of the last ``free_layers_above``: equal caps free nothing

    def encoder_work(self) -> Work:
        """Work executed for sources since the cache was opened; empty without an encoder."""
        return Work.none(len(self.layers))

    def require_earlier_entries(self, first: int, last: int, context: CacheWrite) -> None:
        """Raise MissingEntryError, before any write, unless layers first+1 … last can run ``context``."""
        for layer in self.layers[first:last]:
            layer.require_earlier_entries(context)

    def truncate(self, length: Ints) -> None:
        """Forget, in every layer, entries from absolute position ``length`` [rows] on; shorter layers stay."""
        lengths = self._per_row(length, "length", 0)
        for layer in self.layers:
            layer.truncate(lengths)

    def free_layers_above(self, caps: Ints) -> None:
        """Free the K/V above each row's cap [rows]: layers > cap never serve the row again."""
        new_caps = tuple(self._per_row(caps, "caps", 0))
        if new_caps == self._caps:
            return
        self._caps = new_caps
        same = {row: row for row in range(self.rows)}
        for number, layer in enumerate(self.layers[min(new_caps) :], start=min(new_caps) + 1):
            layer.keep_rows([row for row in range(self.rows) if new_caps[row] >= number], same)

    def drop_rows(self, rows: Ints) -> None:
        """Remove session rows; the remaining keep their order and are renumbered from 0.

        Raises:
            BadArgument: a row that does not exist, or all of them.
        """
        gone = set(np.atleast_1d(np.asarray(rows, dtype=np.int64)).tolist())
        remaining = [row for row in range(self.rows) if row not in gone]
        if not gone <= set(range(self.rows)) or not remaining:
            raise BadArgument("rows", sorted(gone), f"some, not all, of 0–{self.rows - 1}", "make a new cache instead")
        numbers = {row: i for i, row in enumerate(remaining)}
        for layer in self.layers:
            layer.keep_rows(remaining, numbers)
        self.rows = len(remaining)

    def _per_row(self, values: Ints, name: str, least: int) -> list[int]:
        values = np.asarray(values)
        if values.shape != (self.rows,) or (values < least).any():
            raise BadArgument(name, values.tolist(), f"{self.rows} values ≥ {least}, one per row")
        return values.tolist()


class CacheWriter:
    """Cache of a block, in the form that Transformers' modules take.

    ``update`` stores at the forward's positions and returns all K and V to attend to. It holds its
    context weakly: contexts hold their inputs, and in a cycle K/V would wait for the garbage collector.
    """

    def __init__(self, cache: KVCache, context: CacheWrite):
        self.cache, self._layers, self._context_ref = cache, cache.layers, ref(context)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        context = self._context_ref()
        assert context is not None, "a context that is run is held by its caller"
        return self._layers[layer_idx].write(keys, values, context)


def _grow(buffer: Tensor, slots: int) -> Tensor:
    rows, heads, entry_count, width = buffer.shape
    bigger = buffer.new_zeros(rows, heads, max(slots, 2 * entry_count), width)
    bigger[:, :, :entry_count] = buffer
    return bigger
