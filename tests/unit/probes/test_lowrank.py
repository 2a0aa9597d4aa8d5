"""Low-rank factors equal the SVD's; the index that uses them returns exact logits."""

from __future__ import annotations

import pytest
import torch

from emad_ref.errors import BadArgument
from emad_ref.probes import estimators
from emad_ref.probes.estimators import (
    ExactIndex,
    LowRankEntropy,
    LowRankIndex,
    estimate_entropy_and_top1_p,
    low_rank_factors,
    recall_at_k_by_row,
)

VOCABULARY, WIDTH = 300, 20


@pytest.fixture(scope="module")
def rows():
    """Return rows with a falling spectrum around a mean that is larger than all of it."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(2, 0.05, WIDTH, dtype=torch.float64)
    spread = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) * scale
    return spread + 5 * torch.randn(WIDTH, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def states():
    return torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("rank", [1, 5, WIDTH])
def test_the_factors_are_the_svds_of_the_centred_unembedding(rows, rank):
    found, mean = low_rank_factors(rows, rank), rows.mean(dim=0)
    w, s, q = torch.linalg.svd(rows - mean, full_matrices=False)
    assert torch.allclose(found.b.T @ found.a.T, (w[:, :rank] * s[:rank]) @ q[:rank], atol=1e-9)
    assert torch.allclose(found.mean, mean)


def test_the_big_factor_is_stored_row_by_row_of_the_rank(rows):
    outer = low_rank_factors(rows, 3).b
    assert outer.shape == (3, VOCABULARY)
    assert outer.is_contiguous()


def test_the_factors_are_the_same_in_chunks(rows, monkeypatch):
    whole = low_rank_factors(rows, 4)
    monkeypatch.setattr(estimators, "CHUNK", 70)
    parts = low_rank_factors(rows, 4)
    assert torch.allclose(whole.b.T @ whole.a.T, parts.b.T @ parts.a.T, atol=1e-9)


def test_the_mean_is_kept_for_the_softcap(rows, states):
    """Without a cap a shift of all logits changes nothing; with one it does."""
    z = states @ rows.T
    estimate = LowRankEntropy(low_rank_factors(rows, WIDTH), VOCABULARY, softcap=10.0)
    expected, _ = estimate_entropy_and_top1_p((10 * torch.tanh(z / 10)).sort(dim=1, descending=True).values, 0)
    assert torch.allclose(estimate(states)[0], expected, atol=1e-9)


def test_it_costs_both_factors_and_the_mean(rows):
    assert LowRankEntropy(low_rank_factors(rows, 4), 8).macs_per_row == WIDTH * 4 + 4 * VOCABULARY + WIDTH


@pytest.mark.parametrize("rank", [0, WIDTH + 1])
def test_a_rank_the_unembedding_does_not_have_is_refused(rows, rank):
    with pytest.raises(BadArgument, match=rf"estimator.rank={rank}, but expected 1–{WIDTH}"):
        low_rank_factors(rows, rank)


@pytest.mark.parametrize("k", [0, VOCABULARY + 1])
def test_more_logits_than_tokens_are_refused(rows, k):
    with pytest.raises(BadArgument, match=rf"estimator.k={k}, but expected 1–{VOCABULARY}"):
        LowRankEntropy(low_rank_factors(rows, 2), k)


@pytest.mark.parametrize("gathered", [2**24, WIDTH * 8 * 3])
def test_the_index_returns_exact_logits_of_the_rows_it_finds(rows, states, monkeypatch, gathered):
    """All states at once, or three at a time."""
    monkeypatch.setattr(estimators, "GATHERED_ENTRIES", gathered)
    bias = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)
    index = LowRankIndex(rows, low_rank_factors(rows, 10), bias)
    values, ids = index.search(states, 8)
    assert torch.allclose(values, (states @ rows.T + bias).gather(1, ids), atol=1e-9)
    assert (values.diff(dim=1) <= 0).all()
    exact = ExactIndex(rows, bias).search(states, 8)[1]
    assert float(recall_at_k_by_row(ids, exact).mean()) > 0.5, "a random guess finds 3 %"
    assert (
        float(
            recall_at_k_by_row(
                LowRankIndex(rows, low_rank_factors(rows, WIDTH), bias).search(states, 8)[1], exact
            ).mean()
        )
        == 1
    )
    assert index.macs_per_row(8) == WIDTH * 10 + 10 * VOCABULARY + 8 * WIDTH
