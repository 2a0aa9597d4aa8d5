"""Estimator 4, ours: a linear probe from the head's input straight to entropy; not in the paper.

    Ĥ_ℓ = w_ℓ·x + c_ℓ,  x = norm(h_ℓ) [E]

w, c by ridge regression on the calibration pass (``calibration.fit``), one pair per probe: E multiply-adds instead of
E·V. Sees no logits, so it knows no predicted token; and it may come out below zero, which is left as it is, because
only its order and its place against τ matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emad_ref.errors import BadArgument


@dataclass(frozen=True, eq=False)
class Linear:
    """Per probe its ``weights`` [E] and ``intercepts``."""

    weights: tuple[Tensor, ...]
    intercepts: tuple[float, ...]

    @property
    def macs_per_row(self) -> int:
        return self.weights[0].shape[0]

    def __call__(self, normed: Tensor, probe: int) -> Tensor:
        """Ĥ in nats [rows] of the head's input [rows, E] at the ``probe``-th probe (from 0)."""
        weights = self.weights[probe]
        states = normed if normed.dtype == weights.dtype else normed.to(weights.dtype)
        return torch.mv(states, weights) + self.intercepts[probe]


def linear_probe(weights: Sequence[Sequence[float]], probes: int, like: Tensor) -> Linear:
    """The probe with ``weights`` [probes][E + 1], the intercept last, on the device of the unembedding ``like`` [V, E].

    float32, or float64 for float64 models: a sum of E terms in half precision loses the second digit.

    Raises:
        BadArgument: another number of probes or of weights.
    """
    width = like.shape[1]
    if [len(row) for row in weights] != [width + 1] * probes:
        raise BadArgument(
            "estimator.weights",
            [len(row) for row in weights],
            f"for each of {probes} probes {width} weights and an intercept",
            "fit them for this model and these probes",
        )
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    table = torch.tensor([list(row) for row in weights], dtype=dtype, device=like.device)
    intercepts = table[:, -1].tolist()  # numbers, rounded as the weights are: a tensor of one costs a lookup a probe
    return Linear(table[:, :-1].contiguous().unbind(), tuple(intercepts))
