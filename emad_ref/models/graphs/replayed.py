"""Which forwards are captured, and how one is run: input in, replay, result out.

Captured are decoding steps of our own: one query per row, some rows of one cache, blocks on one device that all have
fused steps; and readouts of as few states, where norm and head are modules that nothing hangs on. Prompts, chunks and
K/V-only passes run one by one, on the same buffers. So does everything while a dispatch mode watches
(``models.executed``): it does not see what a graph repeats.

Weights are read at their addresses. Before every replay these are compared with those that the graph was captured with,
and where a parameter was put in another's place the segment is captured again: what holds of a step, that it reads its
module's parameters when it is called, holds of a graph.
"""

from __future__ import annotations

import warnings
import weakref
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from emad_ref.models.anatomy import FAST
from emad_ref.models.cache import Cache
from emad_ref.models.graphs.arena import Arena, Captured, Shelf, Sizes, bucket
from emad_ref.models.graphs.engine import ENGINES, Engine, NotCaptured
from emad_ref.models.graphs.heads import Readouts
from emad_ref.models.graphs.segment import Segment
from emad_ref.models.graphs.static import StaticCache
from emad_ref.models.graphs.weights import addresses, places_of
from emad_ref.models.stepper import Frame

if TYPE_CHECKING:
    from emad_ref.models.causal import CausalStepper

MOST_ROWS = 16  # of a captured step; a batch of more hides what launching takes


class NothingCaptured(UserWarning):
    """Graphs were wanted, and steps run one by one."""


class Graphs:
    """The graphs of one stepper. ``refused``: why nothing is captured any more; empty as long as it is."""

    def __init__(self, stepper: CausalStepper, engine: Engine):
        geometry = stepper.geometry
        self.shelf = Shelf(
            Sizes(
                stepper.layers,
                geometry.kv_heads,
                geometry.head_dim,
                geometry.hidden,
                stepper.dtype,
                stepper.device,
            )
        )
        self._engine, self._owner = engine, weakref.ref(stepper)
        self._places = [places_of([block]) for block in stepper.blocks]
        self._readouts = Readouts(stepper, engine)
        self.refused = ""

    @property
    def said(self) -> str:
        """In a report, behind the backend."""
        return f"nothing captured: {self.refused}" if self.refused else "captured graphs"

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """One whose steps can be captured."""
        stepper = self._owner()
        assert stepper is not None, "asked by its own stepper"
        return StaticCache(self.shelf, stepper.layers, rows, capacity)

    def run(
        self, stepper: CausalStepper, hidden: Tensor, first: int, last: int, frame: Frame, cache: Cache
    ) -> Tensor | None:
        """As ``Stepper.run``, of a frame and a cache that were looked at; None where it is to run one by one.

        Says in ``frame.executed`` how many keys each query is executed against.
        """
        frame.executed = frame.keys
        if not isinstance(cache, StaticCache) or not self._takes(stepper, first, last, frame, cache):
            return None
        keys, arena, rows = bucket(frame.keys), cache.loan.arena(frame.keys), len(frame.rows)
        read = addresses(chain.from_iterable(self._places[first:last]))
        known = arena.graphs.get((first, last, rows, keys))
        # soon some rows leave, and no token is to wait for that capture: it is made with the first
        counts = (rows,) if known is not None and known.read == read else range(1, rows + 1)
        try:
            for count in counts:
                arena.inputs(count).take(hidden, frame)
                captured = self._captured(stepper, first, last, arena, count, keys, read)
        except NotCaptured as reason:
            self._refuse(str(reason))
            return None
        # graphs share memory: the next replay of any of them may overwrite this one's result
        result = captured.replay().clone()
        cache.hold(first, last, frame)
        frame.executed = keys
        return result

    def logits(self, stepper: CausalStepper, hidden: Tensor) -> Tensor | None:
        """As ``Stepper.logits``; None where it is to run by itself."""
        few = 0 < hidden.numel() <= MOST_ROWS * hidden.shape[-1] and hidden.dtype == stepper.dtype
        if not few or not self._readouts.able or not self._may(stepper):
            return None
        try:
            return self._readouts.logits(stepper, hidden)
        except NotCaptured as reason:
            self._refuse(str(reason))
            return None

    def _takes(self, stepper: CausalStepper, first: int, last: int, frame: Frame, cache: StaticCache) -> bool:
        return (
            frame.queries == 1
            and first < last
            and len(frame.rows) <= MOST_ROWS
            and not frame.prepared.ragged
            and cache.loan.shelf is self.shelf
            and cache.holds(first, last)
            and self._may(stepper)
        )

    def _may(self, stepper: CausalStepper) -> bool:
        return (
            not self.refused
            and self._owner() is stepper  # a copy may have other tables, or other blocks
            and not torch.is_grad_enabled()
            and not torch._C._len_torch_dispatch_stack()
        )

    def _captured(
        self, stepper: CausalStepper, first: int, last: int, arena: Arena, rows: int, keys: int, read: tuple[int, ...]
    ) -> Captured:
        """The graph of this segment over weights at ``read``. Raises NotCaptured."""
        found = arena.graphs.get((first, last, rows, keys))
        if found is None or found.read != read:
            segment = Segment(stepper, first, last, arena, arena.inputs(rows), keys)
            found = Captured(self._engine.capture(segment), read, segment)
            arena.keep((first, last, rows, keys), found)
        return found

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        warnings.warn(
            NothingCaptured(f"no graph could be captured, and steps run one by one from here on: {reason}"),
            stacklevel=4,
        )


def graphs_of(stepper: CausalStepper, backend: str) -> tuple[Graphs | None, str]:
    """The graphs of a stepper that is made, and why there are none where its device has an engine; else "".

    ``backend``: the one asked for.
    """
    make = ENGINES.get(stepper.device.type)
    if make is None or backend != FAST:
        return None, ""
    if stepper.places != (stepper.device,):
        return None, "the model is spread over several devices"
    if any(step is None for step, _ in stepper.steps(0, stepper.layers)):
        return None, "some block has no fused step"
    types = {parameter.dtype for block in stepper.blocks for parameter in block.parameters()}
    if types != {stepper.dtype}:
        return None, f"weights of several types: {', '.join(sorted(map(str, types)))}"
    return Graphs(stepper, make(stepper.device)), ""
