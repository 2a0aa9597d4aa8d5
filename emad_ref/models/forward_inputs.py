"""Inputs of the blocks of a decoder-only model in one forward: masks, rotary tables and the cache, by device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.families import SLIDING_ATTENTION
from emad_ref.models.fused.operations import AttentionInputs
from emad_ref.models.kv_cache import KVCache
from emad_ref.models.stepper import CacheWriter, ForwardContext, attention_mask

if TYPE_CHECKING:
    from emad_ref.models.causal import CausalStepper


class LayerPlacement(NamedTuple):
    """What decides a block's arguments: its ``kind`` of attention, and the ``device`` its weights lie on."""

    kind: str
    device: torch.device


class ForwardInputs:
    """What the blocks of one frame take, by station: keyword arguments of modules, or what fused steps are given.

    ``cached``: whether it was made for a cache. ``ragged``: whether its rows may be padded, as prompts are.
    """

    def __init__(self, stepper: CausalStepper, cached: bool, ragged: bool, frame: ForwardContext):
        self._stepper, self._of, self.cached, self.ragged = stepper, ref(frame), cached, ragged
        self._writer: CacheWriter | None = None
        self._arguments: dict[LayerPlacement, dict[str, Any]] = {}
        self._given: dict[LayerPlacement, AttentionInputs] = {}

    @property
    def _frame(self) -> ForwardContext:
        """Its own, not kept alive: frames hold what is prepared for them."""
        frame = self._of()
        assert frame is not None, "a frame that is run is held by its caller"
        return frame

    def meet(self, cache: KVCache | None) -> None:
        """What is prepared reads and writes ``cache`` from now on."""
        if (cache is not None) != self.cached:
            raise BadArgument("cache", cache, "the cache the frame was made for, or None if it was made without one")
        if cache is not None and (self._writer is None or self._writer.cache is not cache):
            self._writer, self._arguments, self._given = CacheWriter(cache, self._frame), {}, {}

    def arguments(self, station: LayerPlacement) -> dict[str, Any]:
        """Keyword arguments of a module."""
        if station not in self._arguments:
            self._arguments[station] = self._arguments_of(station)
        return self._arguments[station]

    def given(self, station: LayerPlacement) -> AttentionInputs:
        """What a fused step is given."""
        if station not in self._given:
            assert self._writer is not None, "fused steps write to a cache"
            walker, frame = self._stepper, self._frame
            turns = None if walker.rotary is None else self._turns(walker.turns(station, frame.keys))
            self._given[station] = AttentionInputs(self._writer, self._mask(station), turns, frame.queries > 1)
        return self._given[station]

    def _arguments_of(self, station: LayerPlacement) -> dict[str, Any]:
        walker, anatomy = self._stepper, self._stepper.anatomy
        arguments: dict[str, Any] = {"attention_mask": self._mask(station), **dict(anatomy.constants)}
        if anatomy.positions_inside:
            arguments["position_ids"] = self._frame.distinct_slots(station.device)
        if walker.rotary is not None:
            arguments["position_embeddings"] = self._turns(walker.rotary_table(station, self._frame.keys))
        if self._writer is not None:
            arguments[anatomy.cache_keyword] = self._writer
        return arguments

    def _mask(self, station: LayerPlacement) -> Tensor | None:
        walker = self._stepper
        return attention_mask(
            self._frame,
            walker.window if station.kind == SLIDING_ATTENTION else None,
            walker.dtype,
            station.device,
            flagged=walker.kernel == "sdpa",
            always=walker.anatomy.always_masked,
        )

    def _turns(self, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the frame's positions, [1, n, …] if all rows start at the same position, else [rows, n, …]."""
        frame, (cos, sin) = self._frame, tables
        if frame.start is not None:
            return cos.narrow(1, frame.start, frame.queries), sin.narrow(1, frame.start, frame.queries)
        slots = frame.slots(cos.device)
        return cos[0][slots], sin[0][slots]
