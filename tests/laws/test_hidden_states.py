"""EMAD-E2 for the reference decoder: not only logits, every hidden state up to D_t equals the full model's.

Under depth that never rises, no earlier token lacks a layer ≤ D_t, so no K/V is missing and none is refilled.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from pytest_emad.audit.tolerances import tolerance
from tests.small_models import FAMILIES, LAYERS, VOCABULARY, small_model

pytestmark = pytest.mark.each_value

PROMPT, FED = 5, 7


class Listening(CausalStepper):
    """A stepper that runs layer by layer and keeps the last position's state after each."""

    def __init__(self, model):
        self.heard: dict[int, torch.Tensor] = {}  # first: the constructor already runs layers
        super().__init__(model)

    def run_layers(self, hidden, first, last, inputs):
        for layer in range(first + 1, last + 1):
            hidden = super().run_layers(hidden, layer - 1, layer, inputs)
            self.heard[layer] = hidden[:, -1]
        return hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_under_any_falling_depth_are_the_full_models(family):
    model = small_model(family)
    listening = Listening(model)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCABULARY, PROMPT + FED)
    allowed = tolerance(model.config.model_type, "float64", "cpu")
    for _ in range(3):
        depths = -np.sort(-rng.integers(1, LAYERS + 1, FED))
        session, _ = WalkedDecoder(listening, full_depth(LAYERS)).start([Prompt(tokens[:PROMPT])])
        for at, depth in enumerate(depths, start=PROMPT):
            listening.heard.clear()
            session.feed(tokens[at : at + 1][None], np.array([[depth]]))
            adaptive = dict(listening.heard)
            assert sorted(adaptive) == list(range(1, depth + 1)), "layers above the depth ran"
            inputs = listening.prepare_forward(np.arange(at + 1)[None], None)
            with torch.inference_mode():
                listening.run_layers(
                    listening.embed(torch.from_numpy(tokens[: at + 1])[None], inputs), 0, LAYERS, inputs
                )
            for layer, state in adaptive.items():
                difference = float((state - listening.heard[layer]).abs().max())
                assert difference <= allowed, f"layer {layer} of token {at} at depth {depth}: {difference:.2e}"
