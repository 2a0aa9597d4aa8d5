"""Free depth: every token up to the ceiling, whatever came before it. Exact, in two ways of backfilling K and V.

``Eager``     free_eager: stopped rows go on to write K and V of the layers above (the last by a K/V-only pass).
              No gain by construction.
``Deferred``  free_deferred (FREE; ``chunked`` too): stopped rows leave; their states wait, and run through a layer when
              a later token of the same row needs it, in one chunk with that token. Compute is moved, not saved, but for
              what no later token ever asked for. What waits can also be asked for itself: ``settle`` takes it to the
              ceiling, where its logits are the full model's (self-speculation verifies by this).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.models.cache import Cache
from emad_ref.point import OperatingPoint
from emad_ref.record import FILLS, Ints
from emad_ref.schedule.flow import Leave, Store, count_blocks, rows_of
from emad_ref.schedule.interface import (
    Admission,
    Counted,
    Places,
    Ran,
    Schedule,
    counted_once,
    every_token,
    reaching,
    stretches,
)

EXACT = FILLS.index("exact")
WHY = "no layer lies outside the model or above the ceiling"


# ---------------------------------------------------------------- flows


class Eager(Leave):
    """All rows run on; ``running`` are those still asked about."""

    def run(self, first: int, last: int) -> Tensor:
        return rows_of(super().run(first, last), self.running)

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        self.running = self.running[going]

    def finish(self) -> None:
        if self.at == self.ceiling:
            return
        super().run(self.at, self.ceiling - 1)
        self.store.stepper.fill(self.hidden, self.ceiling, self.frame, self.store.cache)
        self.store.work.fills[EXACT, self.ceiling - 1] += self.hidden.shape[:2].numel()


class Deferred(Leave):
    """Rows leave, their states wait in the store; a deeper token takes them along, layer by layer."""

    def run(self, first: int, last: int) -> Tensor:
        for below, top, held in _stretches(self.store.cache, first, last, self.frame.rows):
            if held == self.frame.starts:
                super().run(below, top)
            else:
                self._run_with_backlog(below, top, held)
        return self.hidden

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        if layer < self.ceiling:
            for i in stopped.tolist():
                self.store.owed.put(self.frame.rows[i], self.frame.starts[i], self.hidden[i])
        super().stop(stopped, going, layer)

    def _run_with_backlog(self, first: int, last: int, held: tuple[int, ...]) -> None:
        """Layers that lack earlier tokens of some row, over each row's waiting states and its current ones."""
        rows, starts, owed = self.frame.rows, self.frame.starts, self.store.owed
        chunks = [
            torch.stack([*owed.between(row, begin, start), *current])
            for row, begin, start, current in zip(rows, held, starts, self.hidden, strict=True)
        ]
        states = _run_ragged(self.store, chunks, rows, held, first, last)
        for row, begin, start, higher in zip(rows, held, starts, states, strict=True):
            if last == self.ceiling:
                owed.forget(row, begin, start)
            else:
                owed.put(row, begin, higher[: start - begin])
        self.hidden = torch.stack([higher[-self.frame.queries :] for higher in states])


def settle(store: Store, ceiling: int, first: Ints, end: Ints) -> Tensor:
    """States [rows, n, D] at the ceiling of every session row's tokens from ``first`` to before ``end``, both [rows].

    All of them wait, each after a layer of its own, and so may tokens before them, which go up along with them. Each
    runs the layers it has not run, once; rows that lack fewer tokens are padded, and the padding is counted.
    """
    owed = store.owed
    for below, top, held in _stretches(store.cache, 0, ceiling, range(len(end))):
        lacking = [row for row, begin in enumerate(held) if begin < end[row]]
        if not lacking:
            continue
        begins = [held[row] for row in lacking]
        chunks = [torch.stack(owed.between(row, held[row], int(end[row]))) for row in lacking]
        states = _run_ragged(store, chunks, lacking, begins, below, top)
        for row, begin, higher in zip(lacking, begins, states, strict=True):
            owed.put(row, begin, higher)
    bounds = list(zip(first.tolist(), end.tolist(), strict=True))
    settled = torch.stack([torch.stack(owed.between(row, *span)) for row, span in enumerate(bounds)])
    owed.forget_all(end)
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
    store: Store, chunks: Sequence[Tensor], rows: Sequence[int], starts: Sequence[int], first: int, last: int
) -> list[Tensor]:
    """Layers first+1 … last over one chunk [n_row, D] per row, each from its start on.

    Padded on the right to the longest; the padding is counted, because it is executed.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(chunks), batch_first=True)
    frame = store.stepper.frame(
        np.array(starts)[:, None] + np.arange(padded.shape[1]),
        store.cache,
        rows=np.array(rows),
        lengths=np.array([len(chunk) for chunk in chunks]),
    )
    padded = store.stepper.run(padded, first, last, frame, store.cache)
    count_blocks(store.work, first, last, len(rows), padded.shape[1], frame.executed)
    return [states[: len(chunk)] for states, chunk in zip(padded, chunks, strict=True)]


# ---------------------------------------------------------------- admission and replay


def up_to_the_ceiling(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    """What came before does not matter."""
    return Admission(point.ceiling)


def _settle(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    """A token's own first fire is its depth."""


def _ran_eagerly(places: Places, depth: Ints, layer: int, ceiling: int) -> Ran:
    """Backfill at once: every block below the ceiling runs for every token, the last where it was asked for.

    Of the others it writes K and V: its output is not read.
    """
    went = depth >= layer
    ran = went | (layer < ceiling)
    return Ran(ran * places.keys, ~went if layer == ceiling else None)


def _counted_eagerly(places: Places, depth: Ints, histogram: Ints, ceiling: int) -> Counted:
    tokens, context = counted_once(places, depth, histogram, ceiling)[:2]
    tokens[: ceiling - 1], context[: ceiling - 1] = len(depth), places.keys_before[-1]
    fills = np.zeros_like(tokens)
    fills[ceiling - 1] = len(depth) - tokens[ceiling - 1]
    return Counted(tokens, context, fills)


def ran_deferred(places: Places, depth: Ints, layer: int, ceiling: int) -> Ran:
    """A token that stopped below runs with the next of its sequence that goes so deep, against that one's keys."""
    deep = np.flatnonzero(depth >= layer)
    taken_along = np.diff(deep, prepend=-1)  # tokens since the last that went so deep, itself included
    keys = np.zeros(len(depth), dtype=np.int64)
    if len(deep):
        with_whom = np.repeat(deep, taken_along)
        waiting = slice(0, len(with_whom))
        keys[waiting] = (with_whom < places.ends[waiting]) * places.keys[with_whom]
    return Ran(keys)


def counted_deferred(places: Places, depth: Ints, histogram: Ints, ceiling: int) -> Counted:
    """``ran_deferred``, in each stretch of layers to which the same tokens go, by the gaps between those."""
    all_go = reaching(histogram) == len(depth)
    tokens, context = all_go * len(depth), all_go * places.keys_before[-1]
    for layers, deep in stretches(depth, histogram):
        tokens[layers], context[layers] = _taken_along(places, np.flatnonzero(deep))
    return Counted(tokens, context)


def _taken_along(places: Places, deep: Ints) -> tuple[int, int]:
    """How many tokens run a layer, and against how many keys in all, where ``deep`` (ascending) go so deep.

    Each of them takes those along that wait before it in its sequence. One that waits has as many keys more than at its
    own place as tokens lie between: 0 + 1 + … + (g − 1) more for the g tokens that run together.
    """
    bounds = np.searchsorted(deep, places.starts)
    some = np.flatnonzero(np.diff(bounds))  # sequences in which any token goes so deep
    starts, first, ends = places.starts[some], bounds[some], deep[bounds[some + 1] - 1] + 1
    together = np.empty(len(deep))  # floats: their product is several times as fast, and exact below 2⁵³
    np.subtract(deep[1:], deep[:-1], out=together[1:])
    together[first] = deep[first] - starts + 1
    tokens = int((ends - starts).sum())
    waited = (int(together @ together) - tokens) // 2
    return tokens, int((places.keys_before[ends] - places.keys_before[starts]).sum()) + waited


FREE_EAGER = Schedule(
    name="free_eager",
    admit=up_to_the_ceiling,
    flow=Eager,
    why=WHY,
    asked=every_token,
    ran=_ran_eagerly,
    counted=_counted_eagerly,
    settle=_settle,
)

FREE_DEFERRED = Schedule(
    name="free_deferred",
    admit=up_to_the_ceiling,
    flow=Deferred,
    why=WHY,
    asked=every_token,
    ran=ran_deferred,
    counted=counted_deferred,
    settle=_settle,
    deepens=True,
)
