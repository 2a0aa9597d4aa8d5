"""A stepper whose blocks, heads and fills take no time: what is left of a decoding step is the decoder's own part.

Embedding, frames, norms and K/V bookkeeping are those of the stepper it wraps, and so is whatever a decoder asks
beyond blocks and heads. States do not change and logits are zeros. For points whose schedule looks into no cache
(``monotone``, full depth): layers hold no entry here, and a schedule that asks them would find all tokens missing.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from emad_ref.models.cache import Cache
from emad_ref.models.stepper import Frame, Stepper


class Hollow:
    """Everything of ``stepper`` but its passes."""

    def __init__(self, stepper: Stepper):
        self._stepper = stepper
        self._logits = stepper.unembedding.new_zeros(1, stepper.vocabulary)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def run(self, hidden: Tensor, first: int, last: int, frame: Frame, cache: Cache | None) -> Tensor:
        """``hidden`` itself."""
        return hidden

    def fill(self, hidden: Tensor, layer: int, frame: Frame, cache: Cache) -> None:
        """Nothing is written."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Zeros [..., V]."""
        return self._logits.expand(hidden.shape[:-1].numel(), -1).reshape(*hidden.shape[:-1], -1)


def hollow(stepper: Stepper) -> Stepper:
    """``stepper`` without the time of its passes."""
    return cast(Stepper, Hollow(stepper))
