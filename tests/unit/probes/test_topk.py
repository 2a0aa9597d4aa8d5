"""Top-K softmax with a bounded tail: the formula, written out, and its edge cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from emad_ref.errors import BadArgument
from emad_ref.probes.estimators import ExactIndex, TopKEntropy, apply_softcap, estimate_entropy_and_top1_p
from emad_ref.probes.signal_values import entropy_nats

VOCABULARY, WIDTH = 97, 16


def logits(rows: int = 20) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 32, VOCABULARY - 1])
def test_the_estimate_is_the_entropy_of_the_logits_with_the_tail_at_the_floor(k):
    values = logits().topk(k).values
    shown = values.numpy()
    written_out = np.concatenate([shown, np.repeat(shown[:, -1:], VOCABULARY - k, axis=1)], axis=1)
    p = np.exp(written_out - written_out.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    entropy, probability = estimate_entropy_and_top1_p(values, VOCABULARY - k)
    assert entropy.numpy() == pytest.approx(stats.entropy(p, axis=1), rel=1e-12)
    assert probability.numpy() == pytest.approx(p[:, 0], rel=1e-12)


def test_a_floor_of_no_mass_leaves_no_tail():
    values = torch.tensor([[1.0, 0.0, -torch.inf]])
    assert float(estimate_entropy_and_top1_p(values, 1000)[0]) == pytest.approx(float(entropy_nats(values)), rel=1e-6)


def test_logits_that_are_no_numbers_are_not_certainty():
    assert torch.isnan(estimate_entropy_and_top1_p(torch.tensor([[torch.nan, 0.0]]), 5)[0]).all()


def test_half_precision_is_summed_in_float32():
    values = logits().topk(32).values.bfloat16()
    entropy, _ = estimate_entropy_and_top1_p(values, 50_000)
    assert entropy.dtype == torch.float32
    assert entropy.numpy() == pytest.approx(estimate_entropy_and_top1_p(values.double(), 50_000)[0].numpy(), rel=1e-5)


def test_the_cap_is_gemmas_and_keeps_the_order():
    z = torch.linspace(-90, 90, 50, dtype=torch.float64)
    assert torch.equal(apply_softcap(z, None), z)
    assert torch.equal(apply_softcap(z, 30.0), torch.tanh(z / 30) * 30)
    assert (apply_softcap(z, 30.0).diff() > 0).all()


def test_it_reads_entropy_token_and_probability_and_costs_what_its_index_costs():
    generator = torch.Generator().manual_seed(2)
    rows, states = torch.randn(VOCABULARY, WIDTH, generator=generator), torch.randn(6, WIDTH, generator=generator)
    estimate = TopKEntropy(ExactIndex(rows), 8, VOCABULARY)
    entropy, token, probability = estimate(states)
    z = states @ rows.T
    assert torch.equal(token, z.argmax(dim=1))
    assert entropy.shape == probability.shape == (6,)
    assert estimate.macs_per_row == VOCABULARY * WIDTH


@pytest.mark.parametrize("k", [0, VOCABULARY + 1])
def test_more_rows_than_the_vocabulary_are_refused(k):
    with pytest.raises(BadArgument, match=rf"estimator.k={k}, but expected 1–{VOCABULARY}, the size of the vocabulary"):
        TopKEntropy(ExactIndex(torch.zeros(VOCABULARY, WIDTH)), k, VOCABULARY)
