"""A cache over lent buffers. Lengths, rows and what they refuse are ``models.cache``'s; only where K/V lies is not.

A session row keeps its place in the buffers, the same in every layer: a layer that gives a row up forgets it, and
nothing moves. Rows that leave the session for good leave the buffers, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.cache import Cache, LayerCache, Writing, stored
from emad_ref.models.graphs.arena import Loan, Shelf
from emad_ref.record import Ints


class StaticLayer(LayerCache):
    """Keys and values of one layer in borrowed buffers."""

    def __init__(self, number: int, rows: int, capacity: int, loan: Loan):
        super().__init__(number, rows, capacity)
        self._loan = loan

    def entries(self, row: int) -> tuple[Tensor, Tensor]:
        """See ``LayerCache.entries``."""
        held = self._length[self._rows.index(row)]
        if not held:
            raise BadArgument("row", row, "a row with entries", "nothing ran here yet")
        arena, layer = self._loan.arena(held), self._number - 1
        return arena.keys[layer][row, :, :held], arena.values[layer][row, :, :held]

    def write(self, keys: Tensor, values: Tensor, frame: Writing) -> tuple[Tensor, Tensor]:
        """See ``LayerCache.write``: for forwards that are not captured."""
        arena, layer = self._loan.arena(frame.keys), self._number - 1
        places = None if len(frame.rows) == arena.rows else torch.tensor(frame.rows, device=keys.device)
        seen = stored(arena.keys[layer], arena.values[layer], keys, values, frame, places)
        self._hold(frame)
        return seen

    def hold(self, frame: Writing) -> None:
        """A graph has written the frame's K and V."""
        self._hold(frame)

    def keep(self, rows: Sequence[int], numbers: dict[int, int]) -> None:
        """See ``LayerCache.keep``; buffers are the cache's matter."""
        places = [place for place, row in enumerate(self._rows) if row in set(rows)]
        self._length = tuple(self._length[place] for place in places)
        self._rows = tuple(numbers[self._rows[place]] for place in places)


class StaticCache(Cache):
    """A cache whose buffers come from ``shelf`` and go back to it with the cache."""

    def __init__(self, shelf: Shelf, layers: int, rows: int, capacity: int):
        super().__init__(layers, rows, capacity)
        self.loan = loan = Loan(shelf, rows, capacity)
        self._static = [StaticLayer(i + 1, rows, capacity, loan) for i in range(layers)]
        self.layers = [*self._static]
        weakref.finalize(self, loan.end)  # layers hold the loan, not the cache: nothing keeps it alive but its user

    def holds(self, first: int, last: int) -> bool:
        """Whether layers first+1 … last are still those that it was made with: decoders may put others there."""
        return self.layers[first:last] == self._static[first:last]

    def hold(self, first: int, last: int, frame: Writing) -> None:
        """A graph has written K and V of layers first+1 … last."""
        for layer in self._static[first:last]:
            layer.hold(frame)

    def drop(self, rows: Ints) -> None:
        """See ``Cache.drop``."""
        kept = np.delete(np.arange(self.rows), np.atleast_1d(rows)).tolist()
        super().drop(rows)
        self.loan.keep(kept)
