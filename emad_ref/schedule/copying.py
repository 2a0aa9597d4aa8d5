"""Free depth with state copying (CALM): the state at the exit stands in for the states of all layers above.

It passes through norm and K/V projections of every layer above. Later tokens attend to keys of a state that never ran
there: approximate. So a token's state at its depth is not the full model's, and no trace of the full model knows what
its rule would see: copying is decoded, never replayed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from emad_ref.record import FILLS, Ints
from emad_ref.schedule.flow import Leave, Start, rows_of
from emad_ref.schedule.free import WHY, up_to_the_ceiling
from emad_ref.schedule.interface import Counted, Places, Ran, Schedule, counted_once, every_token, ran_once

COPIED = FILLS.index("copied")


class Copying(Leave):
    """Rows leave; when all have, the state each left with fills the layers above it, or what translators make of it."""

    def __init__(self, start: Start):
        super().__init__(start)
        self.whole, self.exits = self.frame, self.hidden.clone()
        self.depth = np.zeros(len(self.hidden), dtype=np.int64)

    def stop(self, stopped: Ints, going: Ints, layer: int) -> None:
        chosen = self.running[stopped]
        self.depth[chosen] = layer
        self.exits[torch.from_numpy(chosen).to(self.exits.device)] = rows_of(self.hidden, stopped)
        super().stop(stopped, going, layer)

    def finish(self) -> None:
        for layer in range(int(self.depth.min()) + 1, self.ceiling + 1):
            rows = np.flatnonzero(self.depth < layer)
            states = self.below(layer, rows)
            self.store.stepper.fill(states, layer, self.whole.take(rows), self.store.cache)
            self.store.work.fills[COPIED, layer - 1] += states.shape[:2].numel()

    def below(self, layer: int, rows: Ints) -> Tensor:
        """What stands in for the states [rows, n, D] below ``layer`` of batch ``rows``, which left before it."""
        states = rows_of(self.exits, rows)
        if self.translators is None:
            return states
        return self.translators.below(states, self.depth[rows], layer, self.store.work)


def _ran(places: Places, depth: Ints, layer: int, ceiling: int) -> Ran:
    """A token runs a layer on its own way up; above its depth its copy is filled in, up to the ceiling."""
    return ran_once(places, depth, layer, ceiling)._replace(fills=(depth < layer) & (layer <= ceiling))


def _counted(places: Places, depth: Ints, histogram: Ints, ceiling: int) -> Counted:
    once = counted_once(places, depth, histogram, ceiling)
    fills = len(depth) - once.tokens
    fills[ceiling:] = 0
    return once._replace(fills=fills)


COPYING = Schedule(
    name="copying",
    admit=up_to_the_ceiling,
    flow=Copying,
    why=WHY,
    asked=every_token,
    ran=_ran,
    counted=_counted,
    settle=None,
    unreplayable="copied states are decoded, not replayed",
    fills="copied",
)
