"""Inputs of the blocks of a decoder-only model in one forward: masks, rotary tables and the cache, by device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.families import SLIDING_ATTENTION
from emad_ref.models.fused_blocks import AttentionInputs
from emad_ref.models.kv_cache import KVCache
from emad_ref.models.stepper import CacheWriter, ForwardContext, attention_mask

if TYPE_CHECKING:
    from emad_ref.models.causal import CausalStepper


class LayerPlacement(NamedTuple):
    """The ``kind`` of a block's attention and the ``device`` of its weights, which decide its inputs."""

    kind: str
    device: torch.device


class ForwardInputs:
    """Inputs of the blocks in the forward of one ``ForwardContext``, computed once per ``LayerPlacement``.

    ``cached``: whether the forward has a cache. ``ragged``: whether its rows may be padded, as prompts are.
    """

    def __init__(self, stepper: CausalStepper, cached: bool, ragged: bool, frame: ForwardContext):
        self._stepper, self._context, self.cached, self.ragged = stepper, ref(frame), cached, ragged
        self._writer: CacheWriter | None = None
        self._arguments: dict[LayerPlacement, dict[str, Any]] = {}
        self._attention_inputs: dict[LayerPlacement, AttentionInputs] = {}

    @property
    def _frame(self) -> ForwardContext:
        """A weak reference: contexts hold their inputs."""
        frame = self._context()
        assert frame is not None, "the caller holds the context that it runs"
        return frame

    def bind(self, cache: KVCache | None) -> None:
        """Let blocks read and write ``cache``."""
        if (cache is not None) != self.cached:
            raise BadArgument("cache", cache, "the cache the frame was made for, or None if it was made without one")
        if cache is not None and (self._writer is None or self._writer.cache is not cache):
            self._writer, self._arguments, self._attention_inputs = CacheWriter(cache, self._frame), {}, {}

    def arguments(self, placement: LayerPlacement) -> dict[str, Any]:
        """Keyword arguments of a block's module."""
        if placement not in self._arguments:
            stepper, anatomy = self._stepper, self._stepper.anatomy
            arguments: dict[str, Any] = {"attention_mask": self._mask(placement), **dict(anatomy.constants)}
            if anatomy.positions_inside:
                arguments["position_ids"] = self._frame.distinct_slots(placement.device)
            if stepper.rotary is not None:
                arguments["position_embeddings"] = self._rotary(stepper.rotary_table(placement, self._frame.keys))
            if self._writer is not None:
                arguments[anatomy.cache_keyword] = self._writer
            self._arguments[placement] = arguments
        return self._arguments[placement]

    def attention_inputs(self, placement: LayerPlacement) -> AttentionInputs:
        """Inputs of a block's fused step."""
        if placement not in self._attention_inputs:
            assert self._writer is not None, "fused steps write to a cache"
            stepper, frame = self._stepper, self._frame
            table = None if stepper.rotary is None else stepper.signed_rotary_table(placement, frame.keys)
            rotary = None if table is None else self._rotary(table)
            inputs = AttentionInputs(self._writer, self._mask(placement), rotary, several=frame.queries > 1)
            self._attention_inputs[placement] = inputs
        return self._attention_inputs[placement]

    def _mask(self, placement: LayerPlacement) -> Tensor | None:
        stepper = self._stepper
        return attention_mask(
            self._frame,
            stepper.window if placement.kind == SLIDING_ATTENTION else None,
            stepper.dtype,
            placement.device,
            flagged=stepper.kernel == "sdpa",
            always=stepper.anatomy.always_masked,
        )

    def _rotary(self, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(cos, sin) at the forward's positions, [1, n, …] if all rows start together, else [rows, n, …]."""
        frame, (cos, sin) = self._frame, tables
        if frame.start is not None:
            return cos.narrow(1, frame.start, frame.queries), sin.narrow(1, frame.start, frame.queries)
        slots = frame.slots(cos.device)
        return cos[0][slots], sin[0][slots]
