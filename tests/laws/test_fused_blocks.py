"""A fused step equals the module's own step; a module with any change keeps its own forward."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models import causal
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fast import fused_blocks
from emad_ref.models.fast.fused_blocks import PackedLinear, fuse_block, fuse_norm
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from pytest_emad.audit.tolerances import tolerance
from tests.small_models import LAYERS, VOCABULARY, lay_out_as_large, small_config, small_model

pytestmark = pytest.mark.each_value

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


def pair(family, dtype="float64", config=None):
    """Return (fused, modules) steppers of one model."""
    model = small_model(family, DTYPES[dtype], config=config)
    fast, slow = CausalStepper(model), CausalStepper(model, backend="walked")
    assert all(step is not None for step in fast._steps)
    assert all(step is None for step in slow._steps)
    return fast, slow


def forward(stepper, cache, tokens, starts, rows=None, lengths=None):
    """Return logits [rows, n, V] of ``tokens`` [rows, n] at ``starts`` [rows]."""
    positions = np.asarray(starts)[:, None] + np.arange(tokens.shape[1])
    inputs = stepper.prepare_forward(positions, cache, rows=rows, lengths=lengths)
    return stepper.logits(stepper.run_layers(stepper.embed(tokens, inputs), 0, stepper.layers, inputs))


@torch.inference_mode()
def walk(stepper, tokens):
    """Return the logits of every kind of forward in decoding, one after the other, on one cache of three rows."""
    cache = stepper.new_cache(3, 4)  # few slots, so that buffers grow
    held = np.array([7, 4, 9])
    seen = [forward(stepper, cache, tokens[:, :9], (0, 0, 0), lengths=held)]  # prompts, padded

    def fed(n, rows=(0, 1, 2)):
        chosen = list(rows)
        columns = torch.from_numpy(held[chosen][:, None] + np.arange(n))
        seen.append(forward(stepper, cache, tokens[chosen].gather(1, columns), held[chosen], rows=np.array(chosen)))
        held[chosen] += n

    fed(1)  # rows at their own positions
    fed(3)
    fed(2, (0, 2))  # some rows of the cache, at different positions
    fed(1, (1,))  # a single row of it
    cache.truncate(held.clip(max=8))
    held[:] = held.clip(max=8)
    fed(1)  # at common positions
    fed(4)
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FUSED)
def test_fused_steps_are_the_modules(family, dtype):
    """Prompts, single queries and chunks, at common and different positions, of all rows and of some."""
    fast, slow = pair(family, dtype)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (3, 24)))
    most = tolerance(fast.config.model_type, dtype, "cpu")
    for ours, theirs in zip(walk(fast, tokens), walk(slow, tokens), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family", ["gpt_neox", "gpt_neox_sequential", "opt", "opt_350m", "llama", "qwen2", "qwen3", "olmo2"]
)
def test_where_every_head_has_its_own_key_they_are_the_modules_to_the_bit(family, dtype, monkeypatch):
    """Except GELU, which uses another kernel of PyTorch, and single tokens, which use other products."""
    monkeypatch.setattr(fused_blocks, "gelu", F.gelu)
    monkeypatch.setattr(causal, "flatten_single_cpu_token", lambda hidden: hidden)
    config = small_config(family)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads
    fast, slow = pair(family, dtype, config)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, VOCABULARY, (3, 24)))
    assert all(torch.equal(*both) for both in zip(walk(fast, tokens), walk(slow, tokens), strict=True))


@torch.inference_mode()
def test_a_cache_that_lacks_the_layers_above():
    """Rows leave at different layers; the rest go on with a smaller batch."""
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, VOCABULARY, (3, 12)))
    states = []
    for stepper in pair("llama"):
        cache = stepper.new_cache(3)
        inputs = stepper.prepare_forward(np.tile(np.arange(6), (3, 1)), cache, lengths=np.array([6, 4, 5]))
        stepper.run_layers(stepper.embed(tokens[:, :6], inputs), 0, LAYERS, inputs)
        inputs = stepper.prepare_forward(np.array([[6, 7], [4, 5], [5, 6]]), cache)
        hidden = stepper.run_layers(stepper.embed(tokens[:, 6:8], inputs), 0, 2, inputs)
        kept = np.array([0, 2])
        states.append(stepper.run_layers(hidden[kept], 2, LAYERS, inputs.select_rows(inputs.running.keep(kept))))
        assert [layer.row_lengths.tolist() for layer in cache.layers[1:3]] == [[8, 6, 7], [8, 4, 7]]
    assert (states[0] - states[1]).abs().max() <= tolerance("llama", "float64", "cpu")


PROBES = (1, 3, 5)
PROMPTS = [Prompt(np.arange(1, 1 + length)) for length in (7, 3, 5)]


def ruled(thresholds, schedule):
    return OperatingPoint(schedule, "quantile", LAYERS, LAYERS, PROBES, (thresholds,), schedule)


def generated(stepper, point):
    return WalkedDecoder(stepper, point, max_rows=3).generate(PROMPTS, 12)


@pytest.mark.parametrize("schedule", ["monotone", "free_deferred"])
@pytest.mark.parametrize("family", FUSED)
def test_decisions_tokens_and_counted_work_are_the_same(family, schedule):
    """Rows of unequal prompts exit at any layer; float64, so that no decision is a tie."""
    fast, slow = pair(family)
    signal = generated(slow, ruled((-1.0, -1.0, -1.0), "monotone")).signal
    thresholds = tuple(float(value) for value in np.nanquantile(signal, 0.4, axis=0))
    ours, theirs = (generated(stepper, ruled(thresholds, schedule)) for stepper in (fast, slow))
    assert len(set(ours.tokens.depth.tolist())) > 1, "the rule must fire"
    for name in ("sequence", "position", "token", "depth", "cap", "phase"):
        assert np.array_equal(getattr(ours.tokens, name), getattr(theirs.tokens, name)), name
    assert np.nanmax(abs(ours.signal - theirs.signal)) <= tolerance(fast.config.model_type, "float64", "cpu")
    for mine, other in ((ours.work, theirs.work), (ours.prompt_work, theirs.prompt_work)):
        assert all(np.array_equal(getattr(mine[0], f.name), getattr(other[0], f.name)) for f in fields(mine[0]))


def block_of(family):
    model = small_model(family)
    return model.get_decoder().layers[0]


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "opt"])
class TestKeepsItsForward:
    """Any change to the module for which a fused step was written."""

    def test_as_made_it_has_a_step(self, family):
        assert fuse_block(block_of(family), "sdpa") is not None

    def test_under_another_kernel(self, family):
        assert fuse_block(block_of(family), "eager") is None

    def test_while_hooked(self, family):
        block = block_of(family)
        inner = next(module for module in block.modules() if isinstance(module, nn.Linear))
        for hang in (inner.register_forward_hook, inner.register_forward_pre_hook):
            handle = hang(lambda *_: None)
            assert fuse_block(block, "sdpa") is None
            handle.remove()
        assert fuse_block(block, "sdpa") is not None

    def test_with_a_replaced_layer(self, family):
        class Wrapped(nn.Linear):
            """Imitates a quantised layer."""

            def forward(self, states):
                return super().forward(states)

        block = block_of(family)
        name = next(name for name, module in block.named_modules() if isinstance(module, nn.Linear))
        block.set_submodule(name, Wrapped(4, 4))
        assert fuse_block(block, "sdpa") is None

    def test_with_a_forward_of_its_own(self, family):
        block = block_of(family)
        block.forward = type(block).forward.__get__(block)
        assert fuse_block(block, "sdpa") is None

    def test_as_a_subclass_of_the_same_name(self, family):
        block = block_of(family)
        kind = type(block)
        block.__class__ = type(kind.__name__, (kind,), {"__module__": __name__})
        assert fuse_block(block, "sdpa") is None

    def test_as_a_copy_that_came_with_a_checkpoint(self, family, monkeypatch):
        block = block_of(family)
        for kind in {type(module) for module in block.modules()}:
            if kind.__module__ == type(block).__module__:
                monkeypatch.setattr(kind.forward, "__module__", "transformers_modules.copy")
        for kind in {type(module) for module in block.modules() if type(module).__module__ == type(block).__module__}:
            monkeypatch.setattr(kind, "__module__", "transformers_modules.copy")
        assert fuse_block(block, "sdpa") is None

    def test_with_a_patched_class(self, family, monkeypatch):
        block = block_of(family)
        kind = type(next(module for name, module in block.named_modules() if name.endswith(("attention", "attn"))))
        monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: None)
        assert fuse_block(block, "sdpa") is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [family for family in FUSED if family != "opt_350m"])  # has no norm before the head
@torch.inference_mode()
def test_the_norm_before_the_head_is_the_modules_to_the_bit(family, dtype):
    fast, slow = pair(family, dtype)
    assert fast._norm is not fast._final_norm
    assert slow._norm is slow._final_norm
    states = 3 * torch.randn(
        2, 5, fast.geometry.hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for some in (states, states[0], states[0, :1], states[0, 0]):
        ours, theirs = (stepper.apply_final_norm(some.to(DTYPES[dtype])) for stepper in (fast, slow))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_a_norm_that_is_not_as_it_was_made_is_called(family, monkeypatch):
    norm = CausalStepper(small_model(family))._final_norm
    assert fuse_norm(norm) is not None
    handle = norm.register_forward_hook(lambda *_: None)
    assert fuse_norm(norm) is None
    handle.remove()
    norm.forward = type(norm).forward.__get__(norm)
    assert fuse_norm(norm) is None
    del norm.forward
    assert fuse_norm(norm) is not None
    kind = type(norm)
    norm.__class__ = type(kind.__name__, (kind,), {"__module__": __name__})
    assert fuse_norm(norm) is None
    assert fuse_norm(nn.GroupNorm(1, 4)) is None


def test_other_families_keep_their_forward():
    assert all(fuse_block(block_of(family), "sdpa") is None for family in ("qwen3_moe", "stablelm", "phi"))


def test_a_parameter_put_in_anothers_place_counts():
    model = small_model("llama")
    stepper, tokens = CausalStepper(model), torch.arange(8)[None]
    model.model.layers[2].mlp.down_proj.weight = nn.Parameter(torch.zeros(32, 48, dtype=torch.float64))
    with torch.inference_mode():
        ours = forward(stepper, stepper.new_cache(1), tokens, (0,))
        assert (ours - model(tokens).logits).abs().max() <= tolerance("llama", "float64", "cpu")


SIBLINGS = tuple(family for family in FUSED if not family.startswith("gpt_neox"))  # NeoX has one weight for q, k, v


@pytest.mark.parametrize("family", SIBLINGS)
def test_steps_over_weights_that_lie_side_by_side_are_the_modules(family, monkeypatch):
    """The layout of large weights; a single token is multiplied with all of them at once."""
    model = small_model(family, torch.float32)
    lay_out_as_large(model, monkeypatch)
    fast, slow = CausalStepper(model), CausalStepper(model, backend="walked")
    joined, chosen = [], PackedLinear._joined_for

    def joined_for(self, states):
        weights = chosen(self, states)
        if states.dim() == 1:
            joined.append(weights is not None)
        return weights

    monkeypatch.setattr(PackedLinear, "_joined_for", joined_for)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (3, 24)))
    most = tolerance(model.config.model_type, "float32", "cpu")
    for ours, theirs in zip(walk(fast, tokens), walk(slow, tokens), strict=True):
        assert (ours - theirs).abs().max() <= most
    assert joined, "one token is multiplied with packed weights"
    assert all(joined)


@pytest.mark.parametrize("name", ["q_proj.weight", "v_proj.weight", "k_proj.bias"])
def test_of_weights_side_by_side_one_put_in_anothers_place_counts(name, monkeypatch):
    """Another parameter, or other data of the same one; the others keep their place."""
    model = small_model("qwen2", torch.float32)
    lay_out_as_large(model, monkeypatch)
    stepper, tokens = CausalStepper(model), torch.arange(8)[None]

    def last():
        cache = stepper.new_cache(1)
        forward(stepper, cache, tokens[:, :7], (0,))
        return forward(stepper, cache, tokens[:, 7:], (7,))[0, 0]

    part = model.model.layers[2].self_attn.get_submodule(name.split(".")[0])
    with torch.inference_mode():
        seen = [last()]
        getattr(part, name.split(".")[1]).data = torch.randn_like(getattr(part, name.split(".")[1]))
        seen.append(last())
        assert (seen[-1] - model(tokens).logits[0, -1]).abs().max() <= tolerance("qwen2", "float32", "cpu")
    setattr(part, name.split(".")[1], nn.Parameter(torch.randn_like(getattr(part, name.split(".")[1]))))
    with torch.inference_mode():
        seen.append(last())
        assert (seen[-1] - model(tokens).logits[0, -1]).abs().max() <= tolerance("qwen2", "float32", "cpu")
    assert min((one - other).abs().max() for one, other in pairwise(seen)) > 1e-2


def test_a_backend_that_is_neither_is_refused():
    with pytest.raises(BadArgument, match="fast, eager, walked"):
        CausalStepper(small_model("llama"), backend="compiled")


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "opt", "qwen3"])
def test_a_token_alone_under_autograd_is_the_modules_too(family):
    """A single token is written in place as a vector, which gradients would not survive."""
    fast, slow = pair(family, "float32")
    tokens = torch.arange(1, 9)[None]
    gradients = []
    for stepper in (fast, slow):
        cache = stepper.new_cache(1)
        with torch.no_grad():
            forward(stepper, cache, tokens[:, :7], (0,))
        inputs = stepper.prepare_forward(np.array([[7]]), cache)
        hidden = stepper.embed(tokens[:, 7:], inputs).detach().requires_grad_()
        stepper.run_layers(hidden, 0, stepper.layers, inputs).square().sum().backward()
        gradients.append(hidden.grad)
    assert gradients[0].abs().max() > 0
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_sessions_on_two_threads_share_nothing_that_a_token_writes(family):
    decoder = WalkedDecoder(pair(family, "float32")[0], full_depth(LAYERS))
    prompts = [[Prompt(np.arange(first, first + 5))] for first in (1, 9)]
    alone = [decoder.generate(each, 60).emitted for each in prompts]
    with ThreadPoolExecutor(2) as pool:
        beside = list(pool.map(lambda each: decoder.generate(each, 60).emitted, prompts * 4))
    for found, wanted in zip(beside, alone * 4, strict=True):
        assert found[0].tolist() == wanted[0].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1, 1, 512), (3, 5, 14), (2, 1, 7)])
def test_gelu_is_gelu_and_keeps_its_shape(shape):
    """Up to the last bits, because a kernel sums in a different order."""
    states = torch.from_numpy(np.random.default_rng(0).normal(size=shape) * 3).float()
    found = fused_blocks.gelu(states)
    assert found.shape == states.shape
    assert found.is_contiguous()
    assert torch.allclose(found, F.gelu(states), rtol=0, atol=1e-6)
    assert torch.equal(fused_blocks.gelu(states.double()), F.gelu(states.double()))


@torch.inference_mode()
def test_tables_may_be_wider_than_the_share_of_a_head_that_turns(monkeypatch):
    """A quarter of 14 is 3, and its table has 4 columns."""
    monkeypatch.setattr(fused_blocks, "gelu", F.gelu)
    config = small_config("gpt_neox")
    config.hidden_size = 56
    model = small_model("gpt_neox", config=config)
    fast, slow = CausalStepper(model), CausalStepper(model, backend="walked")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (3, 24)))
    assert all(torch.equal(*both) for both in zip(walk(fast, tokens), walk(slow, tokens), strict=True))


@torch.inference_mode()
def test_a_copy_with_other_tables_turns_by_them():
    """Planted steppers are such copies: neither side may keep a table that the other made."""
    stepper, tokens = CausalStepper(small_model("llama")), torch.arange(8)[None]
    plain = forward(stepper, stepper.new_cache(1), tokens, (0,))
    moved = copy.copy(stepper)
    moved.rotary_table = lambda *given: tuple(table.roll(1, 1) for table in stepper.rotary_table(*given))
    assert (forward(moved, moved.new_cache(1), tokens, (0,)) - plain).abs().max() > 1e-3
    assert torch.equal(forward(stepper, stepper.new_cache(1), tokens, (0,)), plain)
