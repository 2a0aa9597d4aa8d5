"""Signals: numbers computed from one token's readout that a rule can compare with a threshold.

One function per signal, used by the lens trace and by the decode loop alike: replay equals decoding only if both
compute the same number from the same logits. What contrasts several readouts stands in ``contrast``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emad_ref.errors import EmadError
from emad_ref.record import Ints


class NotFinite(EmadError):
    """Logits hold NaN or +inf: nothing can be decided from them."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What a probe shows: ``signal`` [rows], NaN where none is defined; ``logits`` [rows, V] to emit from, or None.

    None means that a head has to be run at the exit. ``macs`` int64 [rows]: multiply-adds of each row's readout where
    rows may differ in it (pruned vocabularies), else None.
    """

    signal: Tensor
    logits: Tensor | None
    macs: Ints | None = None


def raised(values: Tensor) -> Tensor:
    """float32 of half precision; float32 and float64 as they are."""
    return values if values.dtype == torch.float64 else values.float()


def entropy_nats(logits: Tensor) -> Tensor:
    """Entropy H = log Z − Σ p z of softmax(z), in nats; logits [..., V] → float32 [...] (float64 for float64 logits).

    Half precision is raised to float32 first: 50,000 terms summed in bfloat16 lose the second digit.
    """
    log_p = torch.log_softmax(raised(logits), dim=-1)
    # torch.special.entr-style 0·log 0: a masked logit (-inf) contributes nothing; NaN must stay NaN, for it is not
    # greater than -inf either, and an entropy of 0 would let every rule fire
    return -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(dim=-1)


def softmax_response(logits: Tensor) -> Tensor:
    """Top-1 minus top-2 probability (CALM, "softmax response"); logits [..., V] → float32 or float64 [...]."""
    return margin(torch.log_softmax(raised(logits), dim=-1))


def margin(log_scores: Tensor) -> Tensor:
    """Largest minus second largest of e^x over x [..., n ≥ 2]; [...]."""
    first, second = log_scores.topk(2, dim=-1).values.exp().unbind(dim=-1)
    return first - second


def saturation(hidden: Tensor, below: Tensor) -> Tensor:
    """cos(h_ℓ, h_{ℓ−1}) (CALM, "hidden-state saturation"); states [..., D] of one token → float32 [...].

    float64 for float64 states. A state of length zero, or one that is not finite, gives NaN.
    """
    here, there = raised(hidden), raised(below)
    lengths = torch.linalg.vector_norm(here, dim=-1) * torch.linalg.vector_norm(there, dim=-1)
    cosine: Tensor = (here * there).sum(dim=-1) / lengths
    return cosine


def require_finite(entropy: Tensor, where: str) -> None:
    """Raise NotFinite when an entropy is not a number; ``where`` names the place for the message."""
    if not torch.isfinite(entropy).all():
        bad = int((~torch.isfinite(entropy)).sum())
        raise NotFinite(
            f"logits {where}: {bad} of {entropy.numel()} rows give no finite entropy, but expected finite logits; "
            "check the weights and the dtype (float16 overflows where bfloat16 or float32 do not)"
        )
