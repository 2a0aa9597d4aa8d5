"""EMAD-X7: the backward search over entropy, and the evidence gathered with it on a small model."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.models.causal import CausalStepper
from pytest_emad.claims.confident_layers import find_confident_layers, gather_confident_layers
from tests.small_measurements import small_evidence
from tests.small_models import LAYERS, small_model


@pytest.mark.parametrize(
    ("entropies", "window", "layer"),
    [
        ([3.0, 2.0, 1.0], 2, 3),  # falls into the last layer
        ([1.0, 2.0, 3.0], 2, 1),
        ([1.0, 2.0, 3.0], 1, 2),  # the window ends
        ([0.1, 0.9, 0.5, 0.7], 3, 3),  # the closest valley, not the deepest
        ([1.0, 1.0], 1, 2),  # no step down
    ],
)
def test_the_search_goes_back_while_entropy_falls(entropies: list[float], window: int, layer: int) -> None:
    assert find_confident_layers(np.array([entropies]), window).tolist() == [layer]


def test_each_token_is_read_after_its_own_layer() -> None:
    evidence = small_evidence(CausalStepper(small_model("gpt_neox")))
    found, trace = gather_confident_layers(evidence), evidence.traces.evaluation
    window, expected, moved = max(1, LAYERS // 4), 0.0, 0
    for entropy, nll in zip(trace.entropy_nats, trace.nll_nats, strict=True):
        layer = LAYERS
        while layer > LAYERS - window and entropy[layer - 2] < entropy[layer - 1]:
            layer -= 1
        expected, moved = expected + float(nll[layer - 1]), moved + (layer < LAYERS)
    assert found.nll.values.sum() == pytest.approx(expected, rel=1e-6)
    assert found.full.values.sum() == pytest.approx(float(trace.nll_nats[:, -1].sum(dtype=np.float64)), rel=1e-6)
    assert found.moved == moved / len(trace) > 0
    assert found.tokens.values.sum() == len(trace)
