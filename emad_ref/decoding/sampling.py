"""Logits → next token: the argmax, or a draw at a temperature.

Each row draws from a generator of its own, seeded with (seed, row): a row's tokens do not depend on its neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from emad_ref.errors import BadArgument


class Sampler:
    """Greedy at ``temperature`` 0, else a draw from softmax(logits / temperature)."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        if not 0 <= temperature < math.inf:
            raise BadArgument("temperature", temperature, "a finite number ≥ 0", "0 decodes greedily")
        self.temperature = temperature
        self._generators = [torch.Generator().manual_seed(seed * 1_000_003 + row) for row in range(rows)]

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        """int64 [len(rows)] next tokens for ``logits`` [len(rows), V]; ``rows`` are the original row numbers."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        weights = torch.softmax(logits.double() / self.temperature, dim=-1).cpu()
        draws = [torch.multinomial(w, 1, generator=self._generators[row]) for w, row in zip(weights, rows, strict=True)]
        return torch.cat(draws).to(logits.device)
