"""Signals: numbers computed from one token's readout that a rule can compare with a threshold.

One function per signal, used by the lens trace and by the decode loop alike: replay equals decoding only if both
compute the same number from the same logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emad_ref.errors import EmadError


class NotFinite(EmadError):
    """Logits hold NaN or +inf: nothing can be decided from them."""


def entropy_nats(logits: Tensor) -> Tensor:
    """Entropy H = log Z − Σ p z of softmax(z), in nats; logits [..., V] → float32 [...] (float64 for float64 logits).

    Half precision is raised to float32 first: 50,000 terms summed in bfloat16 lose the second digit.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(z, dim=-1)
    # torch.special.entr-style 0·log 0: a masked logit (-inf) contributes nothing; NaN must stay NaN, for it is not
    # greater than -inf either, and an entropy of 0 would let every rule fire
    return -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(dim=-1)


def require_finite(entropy: Tensor, where: str) -> None:
    """Raise NotFinite when an entropy is not a number; ``where`` names the place for the message."""
    if not torch.isfinite(entropy).all():
        bad = int((~torch.isfinite(entropy)).sum())
        raise NotFinite(
            f"logits {where}: {bad} of {entropy.numel()} rows give no finite entropy, but expected finite logits; "
            "check the weights and the dtype (float16 overflows where bfloat16 or float32 do not)"
        )
