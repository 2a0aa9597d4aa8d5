"""Several linear layers over the same states: one product of a token alone, where their weights lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from emad_ref.models.beside import joined
from emad_ref.models.fused.parts import Given, Packed, linear


class Beside:
    """Linear layers of these ``parameters``, over the same states [rows, n, in], or [in] of a token alone.

    Several tokens are multiplied with one weight after the other, as the modules do it, whose bits they keep.
    ``sizes``: outputs of each.
    """

    __slots__ = ("_joined", "_names", "_owns", "_places", "sizes")

    def __init__(self, *owns: dict[str, Any]):
        self._owns, self.sizes = owns, tuple(len(own["weight"]) for own in owns)
        self._names = [name for name in ("weight", "bias") if any(own[name] is not None for own in owns)]
        self._places: list[int] = []
        self._joined = self._found()

    def __call__(self, states: Tensor, given: Given) -> Sequence[Tensor]:
        """What each of them makes of ``states``; of a token alone, until the forward's next block is asked."""
        if self._joined is not None and states.dim() == 1:
            whole, parts = given.parts(states, self.sizes)
            if self._one(states, whole):
                return parts
        return [linear(states, own) for own in self._owns]

    def write(self, states: Tensor, packed: Packed) -> None:
        """The same, to where ``packed`` has it."""
        if self._joined is None or states.dim() > 1 or not self._one(states, packed.whole):
            for own, written in zip(self._owns, packed.written, strict=True):
                linear(states, own, written)

    def _one(self, states: Tensor, out: Tensor) -> bool:
        """Whether the weights lie side by side; then what they make of a token alone is in ``out`` [all outs].

        Where they lay when the step was made is asked again at every call: a parameter put in another's place counts.
        """
        places = [own[name].data_ptr() for name in self._names for own in self._owns]
        if places != self._places:
            self._joined, self._places = self._found(), places  # in this order: another thread may ask meanwhile
        if self._joined is None:
            return False
        weight, *bias = self._joined
        if bias:
            torch.addmv(bias[0], weight, states, out=out)
        else:
            torch.mv(weight, states, out=out)
        return True

    def _found(self) -> list[Tensor] | None:
        """Weight, and bias if they have one, of all together; None where they are to be taken one by one."""
        if any(own[name] is None for name in self._names for own in self._owns):
            return None
        found = [joined([own[name] for own in self._owns]) for name in self._names]
        return None if any(each is None for each in found) else found  # type: ignore[return-value]  # just seen
