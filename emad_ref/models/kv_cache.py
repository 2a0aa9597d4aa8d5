"""K/V per layer, each layer with its own rows and its own valid length per row; and the running rows that write it.

A hidden state meets one object that says which rows still run, ``RunningRows``: K and V are written at its positions,
masks show its slots, the exit rule decides for its rows, and a schedule removes those that stop.

Slot = position: the key of a row's token at position p lies in slot p of every layer that ran it. Nothing is padded on
the left. Slots at or above a row's length are always masked (a ragged prompt's padding, say), so a rollback by any
number of tokens per row only lowers lengths.

Under adaptive depth layers hold different numbers of tokens. A block at position p needs exactly p entries of that row
below it. Any other number would give silently wrong logits, so the cache raises ``MissingEntryError``. Under the
monotone schedule it never raises: that is the claim "no K/V repair" (EMAD, "KV-consistent scheduling").

This module knows no model and no depth rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument, EmadError
from emad_ref.record import Bools, Ints, Work


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


class RunningRows:
    """The rows of a forward that still run: which they are, where their tokens stand, how deep they may go.

    The one place that says so. The K/V cache writes at their positions, the exit rule decides for them, probes remember
    them and the schedule removes those that stop (``keep``). Each column has one entry per row, in the order of the
    states ``hidden`` [running, n, D].

    Attributes
    ----------
    rows : tuple of int
        Rows of the session, ascending, of which those in the K/V cache have the same numbers.
    starts, lengths, ends : tuple of int
        Position of a row's first token, its number of valid tokens (1…n; the rest is padding), and their sum: the
        length of its K/V after a layer ran.
    start : int or None
        The common first position; None if rows differ.
    queries : int
        n, the tokens of each row with padding.
    keys : int
        Keys up to the last position.
    caps : int64 [running]
        The largest depth that each row may take: D_{t−1} under the monotone schedule (EMAD, "Algorithm (per token)").
    by_rule : bool [running]
        Whether the exit rule may stop the row earlier.
    """

    def __init__(
        self,
        rows: tuple[int, ...],
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        queries: int,
        caps: Ints,
        by_rule: Bools,
    ):
        self.rows, self.starts, self.lengths, self.queries = rows, starts, lengths, queries
        self.caps, self.by_rule = caps, by_rule
        self.ends = tuple([start + n for start, n in zip(starts, lengths, strict=True)])
        self.start = starts[0] if rows and starts.count(starts[0]) == len(starts) else None
        self.keys = max(starts, default=0) + queries
        self._slots: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def row_ids(self) -> Ints:
        """int64 [running]: ``rows`` as indices of arrays over all rows of the session."""
        return np.array(self.rows, dtype=np.int64)

    @cached_property
    def lowest_cap(self) -> int:
        """The smallest of the caps."""
        return int(self.caps.min())

    @cached_property
    def reads_rule(self) -> bool:
        """Whether the exit rule may stop any row."""
        return bool(self.by_rule.any())

    def keep(self, kept: Ints) -> RunningRows:
        """Some of these rows, or none: ``kept`` int64, ascending indices into them."""
        if len(kept) == len(self.rows):
            return self
        chosen = kept.tolist()
        rows, starts, lengths = (
            tuple([column[i] for i in chosen]) for column in (self.rows, self.starts, self.lengths)
        )
        return RunningRows(rows, starts, lengths, self.queries, self.caps[kept], self.by_rule[kept])

    def lower_caps(self, caps: Ints) -> RunningRows:
        """The same rows with smaller ``caps`` [running]."""
        return RunningRows(self.rows, self.starts, self.lengths, self.queries, caps, self.by_rule)

    def positions_on(self, device: torch.device) -> Tensor:
        """int64 [running, n] positions on ``device``."""
        if device not in self._slots:
            first = torch.tensor(self.starts, device=device)
            self._slots[device] = first[:, None] + torch.arange(self.queries, device=device)
        return self._slots[device]

    def broadcastable_positions_on(self, device: torch.device) -> Tensor:
        """int64 [running, n] positions on ``device``, or [1, n] if all rows have the same."""
        slots = self.positions_on(device)
        return slots if self.start is None else slots[:1]


def attention_mask(
    running: RunningRows,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    flagged: bool,
    always: bool = False,
) -> Tensor | None:
    """Additive mask [rows or 1, 1, n, keys]; None if full attention or SDPA's causal flag is correct.

    A query at position p sees slots s ≤ p and, in a window of w, s > p − w. ``flagged``: no mask over several queries
    means SDPA's causal flag. ``always``: a mask even if None would be correct.
    """
    windowed = window is not None and running.keys > window
    # SDPA's flag aligns query i with key i, so it is only correct without earlier positions
    unmasked = running.queries == 1 or (flagged and running.start == 0)
    if running.start is not None and not windowed and unmasked and not always:
        return None
    lowest = torch.finfo(dtype).min
    if running.start is not None and not windowed:  # mask the slots after each query's own
        later = torch.full((1, 1, running.queries, running.keys), lowest, dtype=dtype, device=device)
        return later.triu_(running.start + 1)
    here = running.broadcastable_positions_on(device)
    there = torch.arange(running.keys, device=device)
    visible = there <= here[:, :, None]
    if window is not None and windowed:
        visible &= there > here[:, :, None] - window
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, lowest)[:, None]


def write_kv_entries(
    held_keys: Tensor, held_values: Tensor, keys: Tensor, values: Tensor, running: RunningRows, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Write [rows, kv_heads, n, head_dim] at the rows' slots of two buffers; returns all keys and values.

    ``places`` int64 [rows] of the running rows in the buffers; None if they are all of them.
    """
    if places is not None:
        # an index before and one after the slice: the result is [rows, n, kv_heads, head_dim]
        slots = running.positions_on(keys.device)
        held_keys[places[:, None], :, slots] = keys.transpose(1, 2)
        held_values[places[:, None], :, slots] = values.transpose(1, 2)
    elif running.start is not None:
        held_keys.narrow(2, running.start, running.queries).copy_(keys)
        held_values.narrow(2, running.start, running.queries).copy_(values)
    else:
        at = running.positions_on(keys.device)[:, None, :, None].expand_as(keys)
        held_keys.scatter_(2, at, keys)
        held_values.scatter_(2, at, values)
    seen_keys, seen_values = held_keys.narrow(2, 0, running.keys), held_values.narrow(2, 0, running.keys)
    return (seen_keys, seen_values) if places is None else (seen_keys[places], seen_values[places])


class LayerKVCache:
    """Keys and values of one layer, [rows, kv_heads, capacity, head_dim], for the session rows it still serves.

    They are on the device of the layer's weights.
    """

    def __init__(self, number: int, rows: int, capacity: int):
        self._number, self._capacity = number, capacity
        # tuples: the common case is one comparison with the running rows', which are shared
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

    def require_earlier_entries(self, running: RunningRows) -> None:
        """Raise MissingEntryError unless each row of ``running`` holds exactly the entries below its first position."""
        if self._rows == running.rows and self._length == running.starts:
            return
        lengths = dict(zip(self._rows, self._length, strict=True))
        for row, start in zip(running.rows, running.starts, strict=True):
            if lengths.get(row) != start:
                raise MissingEntryError(self._number, row, start, lengths.get(row))

    def write(self, keys: Tensor, values: Tensor, running: RunningRows) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, n, head_dim] at the rows' slots; returns the keys and values to attend over.

        These are [rows, kv_heads, running.keys, head_dim]: a view of the buffer if all served rows take part.
        """
        if self._keys is None or self._values is None or self._keys.shape[2] < running.keys:
            self._make_room(keys, running.keys)
        assert self._keys is not None
        assert self._values is not None
        places: Tensor | None = None
        if self._rows != running.rows:
            places = torch.tensor([self._rows.index(row) for row in running.rows], device=keys.device)
        attended = write_kv_entries(self._keys, self._values, keys, values, running, places)
        self._hold(running)
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

    def _hold(self, running: RunningRows) -> None:
        if self._rows == running.rows:
            self._length = running.ends
        else:
            ends = dict(zip(running.rows, running.ends, strict=True))
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

    def require_earlier_entries(self, first: int, last: int, running: RunningRows) -> None:
        """Raise MissingEntryError, before any write, unless layers first+1 … last can run ``running``."""
        for layer in self.layers[first:last]:
            layer.require_earlier_entries(running)

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


def make_running_rows(
    layers: int,
    positions: Ints,
    cache: KVCache | None,
    rows: Ints | None,
    lengths: Ints | None,
    end: int | None,
    caps: Ints | None = None,
    by_rule: Bools | None = None,
) -> RunningRows:
    """The rows of ``Stepper.prepare_forward``; ``end``: the first unsupported position, if any. Raises BadArgument."""
    positions = np.asarray(positions)
    if positions.ndim != 2 or 0 in positions.shape:
        raise BadArgument("positions", positions.shape, "shape [rows ≥ 1, n ≥ 1]")
    count, queries = positions.shape
    starts: tuple[int, ...] = tuple(positions[:, 0].tolist())
    if queries > 1 and (np.diff(positions, axis=1) != 1).any():
        raise BadArgument("positions", positions.tolist(), "consecutive positions in each row")
    if min(starts) < 0 or (cache is None and max(starts) > 0):
        raise BadArgument("positions", list(starts), "first positions ≥ 0, and 0 without a cache")
    if end is not None and max(starts) + queries > end:
        raise BadArgument("positions", max(starts) + queries - 1, f"less than {end}")
    present = count if cache is None else cache.rows
    chosen = tuple(range(present)) if rows is None else tuple(np.asarray(rows).tolist())
    if len(chosen) != count or (rows is not None and list(chosen) != sorted({*range(present)} & {*chosen})):
        raise BadArgument("rows", list(chosen), f"{count} ascending rows of 0–{present - 1}")
    valid = (queries,) * count if lengths is None else tuple(np.asarray(lengths).tolist())
    if lengths is not None and (len(valid) != count or not all(1 <= n <= queries for n in valid)):
        raise BadArgument("lengths", list(valid), f"{count} lengths in 1–{queries}")
    caps = np.full(count, layers) if caps is None else caps
    return RunningRows(
        chosen, starts, valid, queries, caps, np.zeros(count, dtype=bool) if by_rule is None else by_rule
    )


class CacheWriter:
    """Cache of a block, in the form that Transformers' modules take: ``update`` stores K and V of the running rows."""

    def __init__(self, cache: KVCache, running: RunningRows):
        self._layers, self._running = cache.layers, running

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, n, head_dim]; returns all keys and values to attend to."""
        return self._layers[layer_idx].write(keys, values, self._running)


def _grow(buffer: Tensor, slots: int) -> Tensor:
    rows, heads, entry_count, width = buffer.shape
    bigger = buffer.new_zeros(rows, heads, max(slots, 2 * entry_count), width)
    bigger[:, :, :entry_count] = buffer
    return bigger
