"""A stepper on a clock that only passes move: what a decoding step takes is then known to the last digit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from emad_ref.models.causal import CausalStepper
from emad_ref.models.stepper import Stepper
from tests.small import small_model


@dataclass
class Clock:
    """Stands still until something is run; ``rate``: how much slower than usual."""

    now: float = 0.0
    rate: float = 1.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds * self.rate


@dataclass(eq=False)
class Ticking:
    """``stepper``, whose parts take these seconds: a block and a head ``more`` of themselves for each further token."""

    stepper: Stepper
    clock: Clock = field(default_factory=Clock)
    embedding: float = 0.25
    block: float = 1.0
    per_key: float = 0.0
    head: float = 3.0
    more: float = 0.125
    norm: float = 0.5
    kv: float = 0.375

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stepper, name)

    def embed(self, tokens: Tensor, frame: Any) -> Tensor:
        self.clock.take(self.embedding)
        return self.stepper.embed(tokens, frame)

    def run(self, hidden: Tensor, first: int, last: int, frame: Any, cache: Any) -> Tensor:
        one = self.block * (1 + self.more * (frame.queries - 1)) + self.per_key * max(frame.starts)
        self.clock.take((last - first) * one)
        return self.stepper.run(hidden, first, last, frame, cache)

    def fill(self, hidden: Tensor, layer: int, frame: Any, cache: Any) -> None:
        self.clock.take(self.kv)
        self.stepper.fill(hidden, layer, frame, cache)

    def normed(self, hidden: Tensor) -> Tensor:
        self.clock.take(self.norm)
        return self.stepper.normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        self.clock.take(self.head * (1 + self.more * (hidden.shape[:-1].numel() - 1)))
        return self.stepper.logits(hidden)


def ticking(**seconds: float) -> Any:
    """A small random GPT-NeoX of six layers on a clock of its own."""
    return Ticking(cast(Stepper, CausalStepper(small_model("gpt_neox"))), **seconds)
