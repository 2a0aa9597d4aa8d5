"""Packed weights: large weights over the same states lie in one buffer, with gaps; each stays a tensor of its own."""

from __future__ import annotations

import io
from copy import deepcopy

import pytest
import torch
import transformers as hf
from torch import nn

from emad_ref.models.fast import weight_layout
from emad_ref.models.fast.fused_blocks import AttentionInputs, PackedLinear, parameters_by_name
from emad_ref.models.fast.weight_layout import (
    RUN_GAP,
    iterate_packable_layer_groups,
    lay_out_weights,
    packed_view,
    to_adjacent_column_major,
)
from tests.small_models import lay_out_as_large, small_model

WIDTH = 768


@pytest.fixture(scope="module")
def large():
    """Return one block whose q, k and v fill large pages together, gate and up too; and the same block unpacked."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 1024}
    config = hf.Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=64)
    torch.manual_seed(0)
    made = hf.Qwen2ForCausalLM(config).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    laid = deepcopy(made)
    lay_out_weights(laid)
    return made, laid


def wholes(model):
    return [packed_view([layer.weight for layer in layers]) for layers in iterate_packable_layer_groups(model)]


def test_joined_they_are_all_of_them_in_order(large):
    _, laid = large
    attention, mlp = laid.model.layers[0].self_attn, laid.model.layers[0].mlp
    for layers in ([getattr(attention, f"{name}_proj") for name in "qkv"], [mlp.gate_proj, mlp.up_proj]):
        weights = [layer.weight for layer in layers]
        whole = packed_view(weights)
        assert torch.equal(whole, torch.cat(weights))
        assert whole.data_ptr() % weight_layout.PAGE == 0
        assert not whole.requires_grad
        assert packed_view(weights[::-1]) is None
        assert packed_view([weights[0], *weights[:-1]]) is None
        assert packed_view([weights[0], weights[-1].clone()]) is None
    biases = [getattr(attention, f"{name}_proj").bias for name in "qkv"]
    assert torch.equal(packed_view(biases), torch.cat(biases))


def test_runs_of_whole_pages_have_a_gap_behind_them(large):
    _, laid = large
    attention, mlp = laid.model.layers[0].self_attn, laid.model.layers[0].mlp
    assert {layer.weight.stride() for layer in (mlp.gate_proj, mlp.up_proj)} == {(1, 2048 + RUN_GAP)}
    assert attention.k_proj.weight.stride() == (1, 768 + 2 * 384), "too short for one"


@pytest.mark.parametrize(("out", "wide", "gap"), [(2048, 512, RUN_GAP), (2100, 512, 0), (1536, 768, 0), (2048, 128, 0)])
def test_a_gap_is_where_it_gains_time(out, wide, gap):
    """After long runs at equal cache addresses within a large weight."""
    assert to_adjacent_column_major([torch.ones(out, wide)])[0].stride() == (1, out + gap)


def test_numbers_stay_and_a_second_time_moves_nothing(large):
    made, laid = large
    assert all(torch.equal(one, other) for one, other in zip(made.parameters(), laid.parameters(), strict=True))
    places = [(each.data_ptr(), each.stride()) for each in laid.parameters()]
    lay_out_weights(laid)
    assert [(each.data_ptr(), each.stride()) for each in laid.parameters()] == places


def test_it_is_saved_copied_and_laid_out_anew(large, tmp_path):
    """By transformers, which refuses tensors with a shared storage; by torch.save; by deepcopy."""
    made, laid = large
    laid.save_pretrained(tmp_path)
    buffer = io.BytesIO()
    torch.save(laid.state_dict(), buffer)
    buffer.seek(0)
    copied = deepcopy(laid)
    read = hf.Qwen2ForCausalLM.from_pretrained(tmp_path)
    for numbers in (read.state_dict(), torch.load(buffer), copied.state_dict()):
        assert list(numbers) == list(made.state_dict())
        assert all(torch.equal(numbers[name], value) for name, value in made.state_dict().items())
    lay_out_weights(copied)
    assert all(whole is not None for whole in wholes(copied))
    own = {each.data_ptr() for each in laid.parameters()}
    assert own.isdisjoint(each.data_ptr() for each in copied.parameters())


def test_what_one_of_them_is_given_changes_no_other(large):
    laid = deepcopy(large[1])
    lay_out_weights(laid)
    attention = laid.model.layers[0].self_attn
    before = [attention.q_proj.weight.clone(), attention.v_proj.weight.clone()]
    with torch.no_grad():
        attention.k_proj.weight.fill_(7)
    assert torch.equal(attention.q_proj.weight, before[0])
    assert torch.equal(attention.v_proj.weight, before[1])


def test_neighbours_by_chance_are_not_joined():
    """The first one's storage ends where the next one's begins."""
    memory = weight_layout.make_aligned_allocator(16)
    assert packed_view([memory(0, 8), memory(8, 8)]) is None
    assert packed_view([memory(0, 16)[:8], memory(8, 8)]) is not None


def test_one_weight_outlives_the_others():
    key = to_adjacent_column_major([torch.ones(1024, 1024), torch.full((1024, 1024), 2.0)])[1]
    assert torch.equal(key, torch.full((1024, 1024), 2.0))


def test_weights_that_two_layers_share_stay_apart(monkeypatch):
    model = small_model("llama", torch.float32)
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight = attention.k_proj.weight
    lay_out_as_large(model, monkeypatch)
    assert attention.v_proj.weight is attention.k_proj.weight
    assert all(attention.q_proj not in layers for layers in iterate_packable_layer_groups(model))
    assert len(list(iterate_packable_layer_groups(model))) == 2 * model.config.num_hidden_layers - 1


@pytest.mark.parametrize("biased", [(True, False, False), (False, True, True)])
def test_with_a_bias_for_some_alone_they_stay_apart(biased, monkeypatch):
    module = nn.Module()
    for name, bias in zip("qkv", biased, strict=True):
        module.add_module(f"{name}_proj", nn.Linear(8, 4, bias=bias))
    before = [each.clone() for each in module.parameters()]
    lay_out_as_large(module, monkeypatch)
    assert list(iterate_packable_layer_groups(module)) == []
    assert all(torch.equal(*both) for both in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("biased", [(True, False), (False, True)])
@torch.inference_mode()
def test_with_a_bias_for_some_alone_they_are_taken_one_by_one(biased):
    layers = [nn.Linear(8, 4, bias=bias) for bias in biased]
    for layer, weight in zip(layers, to_adjacent_column_major([layer.weight for layer in layers]), strict=True):
        layer.weight.data = weight
    state = torch.randn(8)
    parts = PackedLinear(*map(parameters_by_name, layers))(state, AttentionInputs(None, None, None, False))
    for part, layer in zip(parts, layers, strict=True):
        torch.testing.assert_close(part, layer(state))
