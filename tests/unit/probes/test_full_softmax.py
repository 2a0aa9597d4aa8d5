"""The full-softmax readout equals the lens trace."""

from __future__ import annotations

import torch

from emad_ref.probes.estimators import entropy_and_top1
from emad_ref.probes.signal_values import entropy_nats


def test_it_is_the_lens_traces_entropy_token_and_probability_to_the_bit():
    logits = 4 * torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    entropy, token, probability = entropy_and_top1(logits)
    best = torch.log_softmax(logits, dim=-1).topk(2, dim=-1)
    assert torch.equal(entropy, entropy_nats(logits))
    assert torch.equal(token, best.indices[:, 0])
    assert torch.equal(probability, best.values.exp()[:, 0])


def test_half_precision_is_read_in_float32():
    entropy, _, probability = entropy_and_top1(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert entropy.dtype == probability.dtype == torch.float32
