"""A fused step is the module's own step, and whatever is not exactly that module keeps its own forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from emad_ref.audit.tolerances import tolerance
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fused import fused
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from tests.small import LAYERS, VOCABULARY, small_model

FUSED = (
    "gpt_neox",
    "gpt_neox_sequential",
    "opt",
    "opt_350m",
    "llama",
    "llama3",
    "qwen2",
    "qwen3",
    "mistral",
    "mistral_window",
    "smollm3",
    "smollm3_window",
    "olmo2",
    "gemma",
    "gemma3",
    "granite",
)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def pair(family, dtype="float64"):
    """(fused, walked) steppers of one model."""
    model = small_model(family, DTYPES[dtype])
    fast, slow = CausalStepper(model), CausalStepper(model, backend="walked")
    assert all(step is not None for step in fast._steps)
    assert all(step is None for step in slow._steps)
    return fast, slow


def forward(stepper, cache, tokens, starts, rows=None, lengths=None):
    """Logits [rows, n, V] of ``tokens`` [rows, n] at ``starts`` [rows]."""
    positions = np.asarray(starts)[:, None] + np.arange(tokens.shape[1])
    frame = stepper.frame(positions, cache, rows=rows, lengths=lengths)
    return stepper.logits(stepper.run(stepper.embed(tokens, frame), 0, stepper.layers, frame, cache))


@torch.inference_mode()
def walk(stepper, tokens):
    """Logits of every kind of forward that decoding makes, one after the other, on one cache of three rows."""
    cache = stepper.new_cache(3, 4)  # too few slots: buffers grow on the way
    held = np.array([7, 4, 9])
    seen = [forward(stepper, cache, tokens[:, :9], (0, 0, 0), lengths=held)]  # prompts, padded

    def fed(n, rows=(0, 1, 2)):
        chosen = list(rows)
        columns = torch.from_numpy(held[chosen][:, None] + np.arange(n))
        seen.append(forward(stepper, cache, tokens[chosen].gather(1, columns), held[chosen], rows=np.array(chosen)))
        held[chosen] += n

    fed(1)  # rows at their own positions
    fed(3)
    fed(2, (0, 2))  # some rows of the cache, at positions of their own
    fed(1, (1,))  # one row of it
    cache.truncate(held.clip(max=8))
    held[:] = held.clip(max=8)
    fed(1)  # at common positions
    fed(4)
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FUSED)
def test_fused_steps_are_the_modules(family, dtype):
    """Prompts, single queries and chunks, at common and own positions, of all rows and of some."""
    fast, slow = pair(family, dtype)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (3, 24)))
    most = tolerance(fast.config.model_type, dtype, "cpu")
    for ours, theirs in zip(walk(fast, tokens), walk(slow, tokens), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= most
