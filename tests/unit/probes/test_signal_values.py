"""Signal values: entropy in nats; logits that are not finite never count as certainty."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from emad_ref.probes.signal_values import entropy_nats, kl_divergence_nats
from emad_ref.signals import FEW, NotFinite, require_finite, to_numpy_float64


def test_entropy_is_scipys():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    expected = stats.entropy(logits.softmax(-1).numpy(), axis=-1)
    assert entropy_nats(logits).numpy() == pytest.approx(expected, rel=1e-12)


def test_uniform_logits_have_log_v_nats_and_certain_ones_none():
    assert float(entropy_nats(torch.zeros(64))) == pytest.approx(math.log(64), rel=1e-6)
    assert float(entropy_nats(torch.tensor([1000.0, 0.0, 0.0]))) == 0.0


def test_a_masked_logit_contributes_nothing():
    masked = torch.tensor([1.0, 2.0, -torch.inf])
    assert float(entropy_nats(masked)) == pytest.approx(float(entropy_nats(masked[:2])), rel=1e-6)


@pytest.mark.parametrize("bad", [[1.0, torch.nan, 0.0], [torch.nan] * 3, [1.0, torch.inf, 0.0], [-torch.inf] * 3])
def test_what_is_no_distribution_has_no_entropy(bad):
    """An entropy of zero would mean certainty, and every rule would fire."""
    assert torch.isnan(entropy_nats(torch.tensor(bad)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_float32(dtype):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    entropy = entropy_nats(logits)
    assert entropy.dtype == torch.float32
    assert float(entropy) == pytest.approx(float(entropy_nats(logits.double())), rel=1e-5)


def test_float64_stays_float64():
    assert entropy_nats(torch.zeros(4, dtype=torch.float64)).dtype == torch.float64


def test_a_refusal_counts_the_bad_rows_and_names_the_place():
    require_finite(torch.tensor([0.0, 1.0]), "after layer 3")
    with pytest.raises(NotFinite, match=r"logits after layer 3: 1 of 2 rows give no finite entropy.*check the weights"):
        require_finite(torch.tensor([0.0, torch.nan]), "after layer 3")


@pytest.mark.parametrize("shape", [(1, 1), (2, FEW // 2), (2, FEW)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_few_and_many_are_refused_alike(shape, bad):
    values = torch.full(shape, 6e4, dtype=torch.float16)  # their sum is not finite in their own precision
    require_finite(values, "here")
    values[-1, -1] = bad
    with pytest.raises(NotFinite, match=f"1 of {values.numel()} rows"):
        require_finite(values, "here")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_on_the_host_a_signal_is_float64(dtype):
    found = to_numpy_float64(torch.tensor([0.5, math.nan], dtype=dtype))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, [0.5, math.nan])


def test_kl_is_never_negative_and_nothing_is_missed_where_nothing_is():
    final = torch.log_softmax(torch.tensor([[1.0, -torch.inf, 0.0], [2.0, 1.0, 0.0]]), dim=-1)
    found = kl_divergence_nats(final, torch.tensor([[1.0, 3.0, 0.0], [2.0, 1.0, 0.0]]))
    wide = np.exp([1, 3, 0]).sum() / np.exp([1, 0]).sum()
    assert found.tolist() == pytest.approx([np.log(wide), 0.0], abs=1e-6)
    alike = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    same = kl_divergence_nats(torch.log_softmax(alike, dim=-1), alike + 3.0)
    assert 0.0 <= float(same.min()) <= float(same.max()) < 1e-6
