"""Estimator 1, full softmax: the entropy over all V tokens (EMAD, "Entropy estimation at inference").

    Ĥ = H(softmax(z)),  z = head(norm(h)) [V]

The logits double as the output distribution of a token that exits here. Knows logits only: no probe, no threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emad_ref.readout.signals import entropy_nats


def full_softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy in nats, top-1 token int64, top-1 probability), each [...], of ``logits`` [..., V].

    The probability is the exponential of log_softmax, as in the lens trace: conditioning bins built from either agree
    to the bit.
    """
    best = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1).max(dim=-1)
    return entropy_nats(logits), best.indices, best.values.exp()
