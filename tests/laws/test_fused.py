"""A fused step is the module's own step, and whatever is not exactly that module keeps its own forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from emad_ref.models.causal import CausalStepper
from emad_ref.models.fused import fused
from tests.small import small_model

NEOX = ("gpt_neox", "gpt_neox_sequential")


def decoded(stepper, tokens, prompt):
    """Logits of single-token steps after a prompt, one per row and step."""
    cache = stepper.new_cache(len(tokens))
    positions = np.tile(np.arange(prompt), (len(tokens), 1))
    frame = stepper.frame(positions, cache)
    stepper.run(stepper.embed(tokens[:, :prompt], frame), 0, stepper.layers, frame, cache)
    steps = []
    for at in range(prompt, tokens.shape[1]):
        frame = stepper.frame(np.full((len(tokens), 1), at), cache)
        hidden = stepper.run(stepper.embed(tokens[:, at : at + 1], frame), 0, stepper.layers, frame, cache)
        steps.append(stepper.logits(hidden))
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("family", NEOX)
@torch.inference_mode()
def test_fused_steps_are_the_modules(family):
    model = small_model(family)
    stepper = CausalStepper(model)
    assert all(step is not block for (step, _), (block, _) in zip(stepper._steps, stepper._blocks, strict=True))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, stepper.vocabulary, (3, 20)))
    fast = decoded(stepper, tokens, 6)
    stepper._steps = stepper._blocks
    assert (fast - decoded(stepper, tokens, 6)).abs().max() < 1e-12
    assert (fast - model(tokens).logits[:, 6:]).abs().max() < 1e-12


def test_a_hooked_block_keeps_its_forward():
    block = small_model("gpt_neox").gpt_neox.layers[0]
    assert fused(block, "sdpa") is not None
    handle = block.attention.dense.register_forward_hook(lambda module, inputs, output: output)
    assert fused(block, "sdpa") is None
    handle.remove()
    assert fused(block, "sdpa") is not None


def test_another_kernel_or_a_replaced_layer_keeps_its_forward():
    block = small_model("gpt_neox").gpt_neox.layers[0]
    assert fused(block, "eager") is None

    class Wrapped(nn.Linear):
        """Stands for a quantised layer."""

    block.attention.dense = Wrapped(*block.attention.dense.weight.shape)
    assert fused(block, "sdpa") is None


def test_other_families_keep_their_forward():
    assert fused(small_model("llama").model.layers[0], "sdpa") is None
