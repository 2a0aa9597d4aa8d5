"""The linear entropy probe: a dot product without clamp, in float32 at least."""

from __future__ import annotations

import pytest
import torch

from emad_ref.errors import BadArgument
from emad_ref.probes.estimators import build_linear_probe

WEIGHTS = ((1.0, -2.0, 0.5), (0.0, 1.0, -3.0))


def unembedding(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(7, 2, dtype=dtype)


def test_each_probe_has_its_weights_and_its_intercept():
    probe = build_linear_probe(WEIGHTS, 2, unembedding(torch.float32))
    states = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
    assert probe(states, 0).tolist() == [-0.5, 2.5], "below zero stays below zero"
    assert probe(states, 1).tolist() == [-2.0, -3.0]
    assert probe.macs_per_row == 2


@pytest.mark.parametrize(
    ("model", "sums"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_states_are_summed_in_float32(model, sums):
    probe = build_linear_probe(WEIGHTS, 2, unembedding(model))
    assert probe(torch.ones(3, 2, dtype=model), 0).dtype == sums


@pytest.mark.parametrize(("weights", "probes"), [(WEIGHTS, 3), (WEIGHTS, 1), ((), 2), (((1.0, 2.0),), 1)])
def test_weights_of_other_probes_or_another_width_are_refused(weights, probes):
    with pytest.raises(BadArgument, match=rf"for each of {probes} probes 2 weights and an intercept"):
        build_linear_probe(weights, probes, unembedding(torch.float32))
