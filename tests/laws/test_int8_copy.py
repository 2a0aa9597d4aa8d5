"""An int8 copy decodes, token by token and at any admissible depth, what its own full model reads out there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

import emad_ref
from emad_ref.calibration.trace import take_trace, trace_stepwise
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.quantisation import copy_with_int8_weights, int8_copy
from emad_ref.models.stepper import count_parameters
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.replay.replay import replay
from tests.small_models import small_model

ROUNDING = 1e-5  # traces hold float32


@pytest.fixture(scope="module")
def loaded():
    return emad_ref.load("emad-nano")


@pytest.fixture(scope="module")
def int8(loaded):
    return int8_copy(loaded)


def test_blocks_are_quantised_and_the_original_is_not(loaded, int8):
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        ours, theirs = int8.model(ids).logits, loaded.model(ids).logits
    assert 1e-4 < (ours - theirs).abs().max() < 0.2 * theirs.abs().max()
    assert type(loaded.model.gpt_neox.layers[0].mlp.dense_h_to_4h) is torch.nn.Linear
    assert int8.fingerprint != loaded.fingerprint
    assert int8.name == "emad-nano int8"


def test_stepwise_trace_is_what_adaptive_decoding_does(int8):
    sequence = TokenSequence(np.random.default_rng(0).integers(1, 400, 40), 4)
    trace = trace_stepwise(int8.stepper, sequence)
    thresholds = tuple(float(np.quantile(trace.entropy_nats[:, layer - 1], 0.05)) for layer in (1, 2))
    point = OperatingPoint("quantile", "quantile", 4, 4, (1, 2), (thresholds,))
    expected = replay(trace, point)
    assert len(set(expected.depth.tolist())) > 1
    session, step = WalkedDecoder(int8.stepper, point).start([Prompt(sequence.tokens[:5])])
    depths = []
    for at in range(4, 39):
        logits = step.logits[0, 0]
        nll = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[sequence.tokens[at + 1]]
        assert abs(nll - expected.nll_nats[at - 4]) < ROUNDING
        depths.append(int(step.depth[0, 0]))
        if at < 38:
            step = session.feed(sequence.tokens[at + 1][None, None])
    assert depths == expected.depth.tolist()


def test_on_a_float_model_stepwise_and_batched_traces_agree(loaded):
    sequence = TokenSequence(np.random.default_rng(1).integers(1, 400, 30), 7)
    step, batch = trace_stepwise(loaded.stepper, sequence), take_trace(loaded.stepper, [sequence])
    assert np.abs(step.entropy_nats - batch.entropy_nats).max() < 1e-4
    for name in ("token", "target", "position", "starts", "first_decided"):
        assert np.array_equal(getattr(step, name), getattr(batch, name)), name


def test_quantised_blocks_keep_their_own_forward(int8):
    assert all(step is None for step in int8.stepper._steps)
    record = WalkedDecoder(int8.stepper, full_depth(4)).generate([Prompt(np.array([1, 2, 3]))], 5)
    assert len(record.emitted[0]) == 5


def test_packed_weights_are_exempt_from_the_parameter_count_and_nothing_else_is(loaded, int8):
    assert count_parameters(loaded.model) == loaded.geometry.parameter_count()
    assert sum(p.numel() for p in int8.model.parameters()) < loaded.geometry.parameter_count()
    assert count_parameters(int8.model) is None


def test_a_model_that_cannot_be_quantised_here_is_refused(loaded):
    double = small_model("llama")  # float64
    with pytest.raises(BadArgument, match=r"torch\.float64 on cpu.*float32 on the CPU"):
        int8_copy(
            type(loaded)(
                "x", double, None, "f", CausalStepper(double).geometry, False, False, {}, loaded.special_tokens, ()
            )
        )
    gpt2 = small_model("gpt2", torch.float32)
    with pytest.raises(BadArgument, match=r"blocks made of nn\.Linear"):
        int8_copy(
            type(loaded)(
                "x", gpt2, None, "f", CausalStepper(gpt2).geometry, False, False, {}, loaded.special_tokens, ()
            )
        )


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "opt", "llama", "qwen3_moe"])
def test_rounded_weights_have_eight_bits_an_output_channel_in_any_family(family):
    model = small_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rounded = copy_with_int8_weights(model)
    embeddings = {id(each) for module in (rounded.get_input_embeddings(), rounded.get_output_embeddings())
                  for each in module.parameters()}  # fmt: skip
    transposed = {id(module.weight) for module in rounded.modules() if isinstance(module, Conv1D)}
    assert (family == "gpt2") == bool(transposed)
    changed = 0
    for name, weight in rounded.named_parameters():
        original = before[name].float()
        if weight.ndim == 1 or id(weight) in embeddings or "wpe" in name or "embed_positions" in name:
            assert torch.equal(weight, original), name
            continue
        rows, known = (each.mT if id(weight) in transposed else each for each in (weight.detach(), original))
        step = known.abs().amax(-1, keepdim=True) / 127
        multiples = rows / step
        assert (multiples - multiples.round()).abs().max() < 1e-3, name
        assert ((rows - known).abs() <= step / 2 * (1 + 1e-4)).all(), name
        changed += int(not torch.equal(weight, original))
    assert changed >= 4 * model.config.num_hidden_layers
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
