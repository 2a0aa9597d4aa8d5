"""One forward: its rows and positions, and its attention masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.kv_cache import KVCache
from emad_ref.record import Ints


class ForwardContext:
    """The rows and positions of one forward, and its blocks' inputs, computed once.

    ``Stepper.prepare_forward`` makes it.

    ``rows``, ``starts``, ``lengths``, ``ends``: per row, its session row, first position, valid tokens, and length
    after a layer ran. ``start``: the common first position, None if rows differ. ``queries``: n. ``keys``: keys up to
    the last position. ``executed``: keys that every query was executed against in the last run, padding and masked
    ones included: ``keys``, or more where a captured graph fixes the number (``models.fast.graph_capture``).
    ``prepared``: the stepper's own inputs of its blocks, ``prepare(self)``.
    """

    def __init__(
        self,
        rows: tuple[int, ...],
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        queries: int,
        prepare: Callable[[ForwardContext], Any],
    ):
        self.rows, self.starts, self.lengths, self.queries = rows, starts, lengths, queries
        self.ends = tuple(start + n for start, n in zip(starts, lengths, strict=True))
        self.start = starts[0] if starts.count(starts[0]) == len(starts) else None
        self.keys = self.executed = max(starts) + queries
        self._slots: dict[torch.device, Tensor] = {}
        self._taken: dict[tuple[int, ...], ForwardContext] = {}
        self._prepare = prepare
        self.prepared = prepare(self)

    def select_rows(self, keep: Ints) -> ForwardContext:
        """The context of a subset of the rows, ``keep`` int64 indices into them, for states ``hidden[keep]``."""
        chosen = tuple(np.asarray(keep, dtype=np.int64).tolist())
        if chosen not in self._taken:
            if not chosen or not all(0 <= i < len(self.rows) for i in chosen):
                raise BadArgument("keep", list(chosen), f"some indices in 0–{len(self.rows) - 1}")
            rows, starts, lengths = (
                tuple(column[i] for i in chosen) for column in (self.rows, self.starts, self.lengths)
            )
            self._taken[chosen] = ForwardContext(rows, starts, lengths, self.queries, self._prepare)
        return self._taken[chosen]

    def positions_on(self, device: torch.device) -> Tensor:
        """int64 [rows, n] positions on ``device``."""
        if device not in self._slots:
            first = torch.tensor(self.starts, device=device)
            self._slots[device] = first[:, None] + torch.arange(self.queries, device=device)
        return self._slots[device]

    def broadcastable_positions_on(self, device: torch.device) -> Tensor:
        """int64 [rows, n] positions on ``device``, or [1, n] if all rows have the same."""
        slots = self.positions_on(device)
        return slots if self.start is None else slots[:1]


def make_forward_context(
    positions: Ints,
    cache: KVCache | None,
    rows: Ints | None,
    lengths: Ints | None,
    end: int | None,
    prepare: Callable[[ForwardContext], Any],
) -> ForwardContext:
    """``Stepper.prepare_forward``; ``end``: the first unsupported position, if any. Raises BadArgument."""
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
    return ForwardContext(chosen, starts, valid, queries, prepare)


def attention_mask(
    context: ForwardContext,
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
    windowed = window is not None and context.keys > window
    # SDPA's flag aligns query i with key i, so it is only correct without earlier positions
    unmasked = context.queries == 1 or (flagged and context.start == 0)
    if context.start is not None and not windowed and unmasked and not always:
        return None
    lowest = torch.finfo(dtype).min
    if context.start is not None and not windowed:  # mask the slots after each query's own
        later = torch.full((1, 1, context.queries, context.keys), lowest, dtype=dtype, device=device)
        return later.triu_(context.start + 1)
    here = context.broadcastable_positions_on(device)
    there = torch.arange(context.keys, device=device)
    visible = there <= here[:, :, None]
    if window is not None and windowed:
        visible &= there > here[:, :, None] - window
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, lowest)[:, None]


class LayerPlacement(NamedTuple):
    """The ``kind`` of a block's attention and the ``device`` of its weights, which decide its inputs."""

    kind: str
    device: torch.device
