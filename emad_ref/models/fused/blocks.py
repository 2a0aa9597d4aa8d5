"""Fused blocks by family: Llama and its relatives, GPT-NeoX, OPT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emad_ref.models.fused.operations import (
    AttentionInputs,
    FusedBlock,
    PackedLinear,
    PackedQKV,
    Pointwise,
    RotaryTables,
    activation,
    attend,
    buffer_for,
    layer_norm,
    linear,
    parameter_table,
    rotate,
    token_shape,
)


class NormNames(NamedTuple):
    """Attributes of a block that hold its norms, None where it has none; ``norm`` makes one a function."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    norm: Callable[[Any], Pointwise]


def llama_block(names: NormNames, block: Any) -> FusedBlock:
    """The step of a decoder layer like Llama's."""
    attention, mlp = block.self_attn, block.mlp
    head, scale, index, act = attention.head_dim, attention.scaling, attention.layer_idx, activation(mlp.act_fn)
    first, after_first = (_norm_of(block, names.norm, name) for name in (names.before_attention, names.after_attention))
    second, after_second = (_norm_of(block, names.norm, name) for name in (names.before_mlp, names.after_mlp))
    query_norm, key_norm = (_norm_of(attention, names.norm, name) for name in ("q_norm", "k_norm"))
    uses_rotary, factor = getattr(attention, "use_rope", True), getattr(block, "residual_multiplier", None)
    mixed = PackedLinear(*(parameter_table(getattr(attention, f"{name}_proj")) for name in "qkv"))
    widened = PackedLinear(parameter_table(mlp.gate_proj), parameter_table(mlp.up_proj))
    out, down = parameter_table(attention.o_proj), parameter_table(mlp.down_proj)
    sizes = (*mixed.sizes[:2], head)
    whole = query_norm is not None and attention.q_norm.weight.shape[0] != head

    def heads(projected: Tensor, norm: Pointwise | None, tokens: tuple[int, int]) -> Tensor:
        if norm is not None and whole:
            projected = norm(projected)
        split = projected.view(*tokens, -1, head)
        return norm(split) if norm is not None and not whole else split

    def step(states: Tensor, inputs: AttentionInputs) -> Tensor:
        normed = states if first is None else first(states)
        if query_norm is None and not torch.is_grad_enabled():
            packed = inputs.packed(states, sizes, _packed_llama)
            mixed.write(normed, packed)
            query, key, value = packed.query, packed.key, packed.value
            if uses_rotary:
                assert inputs.rotary is not None
                packed.rotate_parts(inputs.rotary)
        else:
            tokens = token_shape(states)
            projected = zip(mixed(normed, inputs), (query_norm, key_norm, None), strict=True)
            query, key, value = (heads(each, norm, tokens) for each, norm in projected)
            if uses_rotary:
                assert inputs.rotary is not None
                both = rotate(torch.cat((query, key), dim=2).unsqueeze(3), inputs.rotary).squeeze(3)
                query, key = both.split((query.shape[2], key.shape[2]), dim=2)
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        keys, values = inputs.writer.update(key, value, index)
        change = linear(attend(query, keys, values, inputs, scale, states), out)
        base = _add_residual(states, change if after_first is None else after_first(change), factor)
        normed = base if second is None else second(base)
        gate, up = widened(normed, inputs)
        change = linear(act(gate) * up, down)
        return _add_residual(base, change if after_second is None else after_second(change), factor)

    return step


def _packed_llama(states: Tensor, _rotary: RotaryTables | None, queries: int, keys: int, head: int) -> PackedQKV:
    """All heads of the queries, of the keys, of the values."""
    whole, tokens = buffer_for(states, queries + 2 * keys), token_shape(states)
    written = whole.split((queries, keys, keys), dim=-1)
    query, key, value = (each.view(*tokens, -1, head).transpose(1, 2) for each in written)
    rotated = whole.narrow(-1, 0, queries + keys).view(*tokens, -1, 1, head)
    return PackedQKV(whole, tuple(written), rotated, query, key, value)


def _add_residual(hidden: Tensor, change: Tensor, factor: float | None) -> Tensor:
    return change.add_(hidden) if factor is None else hidden + change * factor


def _norm_of(owner: Any, norm: Callable[[Any], Pointwise], name: str | None) -> Pointwise | None:
    return None if name is None or not hasattr(owner, name) else norm(getattr(owner, name))


def llama_norm(module: Any) -> Pointwise:
    """Llama's RMSNorm: the float32 quotient is rounded to the model's dtype before it meets the weight."""
    quotient, own = _normalise(module, module.variance_epsilon), parameter_table(module)
    return lambda states: own["weight"] * quotient(states).to(states.dtype)


def olmo2_norm(module: Any) -> Pointwise:
    """OLMo2's RMSNorm: weight and quotient meet before the product is rounded."""
    quotient, own = _normalise(module, module.variance_epsilon), parameter_table(module)
    return lambda states: (own["weight"] * quotient(states)).to(states.dtype)


def gemma_norm(module: Any) -> Pointwise:
    """Gemma's RMSNorm: the weight counts from one, in float32."""
    quotient, own = _normalise(module, module.eps), parameter_table(module)
    return lambda states: (quotient(states) * (1.0 + own["weight"].float())).to(states.dtype)


def _normalise(module: Any, eps: float) -> Pointwise:
    """x / √(mean x² + ε) in float32; the weight stays outside, for inside it is multiplied in another order.

    Of a token alone (``parts.alone``), mean and ε are one product: PyTorch's own norm is seven operations on a CPU,
    twice the time. Its sum is in another order.
    """
    width = _width(module)
    with torch.inference_mode(False):  # steps may be made where no gradient is, and run where one is
        added = torch.full((1,), eps)

    def quotient(states: Tensor) -> Tensor:
        if states.dim() > 1:
            return torch.rms_norm(states.float(), width, None, eps)
        return states * torch.addmv(added, states[None], states, alpha=1 / width[0]).rsqrt_()

    return quotient


def _width(module: nn.Module) -> tuple[int, ...]:
    return tuple(parameter_table(module)["weight"].shape)


RMS_NORMS: dict[str, Callable[[Any], Pointwise]] = {
    "LlamaRMSNorm": llama_norm,
    "Qwen2RMSNorm": llama_norm,
    "Qwen3RMSNorm": llama_norm,
    "MistralRMSNorm": llama_norm,
    "SmolLM3RMSNorm": llama_norm,
    "GraniteRMSNorm": llama_norm,
    "GemmaRMSNorm": gemma_norm,
    "Gemma3RMSNorm": gemma_norm,
    "Olmo2RMSNorm": olmo2_norm,
}
_PRE_NORM = NormNames("input_layernorm", None, "post_attention_layernorm", None, llama_norm)
_POST_NORM = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm", olmo2_norm)
_PRE_AND_POST_NORM = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    gemma_norm,
)
LLAMA_BLOCKS: dict[str, Callable[[Any], FusedBlock | None]] = {
    "LlamaDecoderLayer": partial(llama_block, _PRE_NORM),
    "Qwen2DecoderLayer": partial(llama_block, _PRE_NORM),
    "Qwen3DecoderLayer": partial(llama_block, _PRE_NORM),
    "MistralDecoderLayer": partial(llama_block, _PRE_NORM),
    "SmolLM3DecoderLayer": partial(llama_block, _PRE_NORM),
    "GraniteDecoderLayer": partial(llama_block, _PRE_NORM),
    "GemmaDecoderLayer": partial(llama_block, _PRE_NORM._replace(norm=gemma_norm)),
    "Gemma3DecoderLayer": partial(llama_block, _PRE_AND_POST_NORM),
    "Olmo2DecoderLayer": partial(llama_block, _POST_NORM),
}


def gpt_neox_block(block: Any) -> FusedBlock:
    """The step of a ``GPTNeoXLayer``."""
    attention, mlp = block.attention, block.mlp
    first, second = block.input_layernorm, block.post_attention_layernorm
    width, first_eps, second_eps = first.normalized_shape, first.eps, second.eps
    head, scale = attention.head_size, attention.scaling
    index, parallel, act = attention.layer_idx, block.use_parallel_residual, activation(mlp.act)
    norm, inner_norm = parameter_table(first), parameter_table(second)
    mix, out = parameter_table(attention.query_key_value), parameter_table(attention.dense)
    up, down = parameter_table(mlp.dense_h_to_4h), parameter_table(mlp.dense_4h_to_h)

    def step(states: Tensor, inputs: AttentionInputs) -> Tensor:
        normed = torch.layer_norm(states, width, norm["weight"], norm["bias"], first_eps)
        assert inputs.rotary is not None
        if torch.is_grad_enabled():
            # each head's output is [query | key | value], so this view costs nothing
            mixed = linear(normed, mix).view(*states.shape[:2], -1, 3, head)
            rotate(_rotated_part(mixed, inputs.rotary), inputs.rotary)
            query, key, value = mixed.transpose(1, 2).unbind(3)
        else:
            packed = inputs.packed(states, (normed.shape[-1] // head, head), _packed_neox)
            linear(normed, mix, packed.whole)
            packed.rotate_parts(inputs.rotary)
            query, key, value = packed.query, packed.key, packed.value
        keys, values = inputs.writer.update(key, value, index)
        change = linear(attend(query, keys, values, inputs, scale, states), out)
        base = states if parallel else change + states
        normed = torch.layer_norm(base, width, inner_norm["weight"], inner_norm["bias"], second_eps)
        inner = linear(act(linear(normed, up)), down)
        return inner.add_(change).add_(states) if parallel else inner.add_(base)

    return step


def _packed_neox(states: Tensor, rotary: RotaryTables, heads: int, head: int) -> PackedQKV:
    whole = buffer_for(states, heads * 3 * head)
    mixed = whole.view(*token_shape(states), heads, 3, head)
    return PackedQKV(whole, (whole,), _rotated_part(mixed, rotary), *mixed.transpose(1, 2).unbind(3))


def _rotated_part(mixed: Tensor, rotary: RotaryTables) -> Tensor:
    """What turns of queries and keys: as wide as the tables are, which the config may say narrower."""
    return mixed.narrow(3, 0, 2).narrow(4, 0, rotary[0].shape[-1])


NEOX_BLOCKS: dict[str, Callable[[Any], FusedBlock | None]] = {"GPTNeoXLayer": gpt_neox_block}


def opt_block(block: Any) -> FusedBlock:
    """The step of an ``OPTDecoderLayer``."""
    attention, before = block.self_attn, block.do_layer_norm_before
    head, scale, index = attention.head_dim, attention.scaling, attention.layer_idx
    act = activation(block.activation_fn)
    first, second = layer_norm(block.self_attn_layer_norm), layer_norm(block.final_layer_norm)
    mixed = PackedLinear(*(parameter_table(getattr(attention, f"{name}_proj")) for name in "qkv"))
    out, up, down = parameter_table(attention.out_proj), parameter_table(block.fc1), parameter_table(block.fc2)

    def step(states: Tensor, inputs: AttentionInputs) -> Tensor:
        tokens = token_shape(states)
        normed = first(states) if before else states
        query, key, value = mixed(normed, inputs)
        query, key, value = (each.view(*tokens, -1, head).transpose(1, 2) for each in (query * scale, key, value))
        keys, values = inputs.writer.update(key, value, index)
        base = states + linear(attend(query, keys, values, inputs, 1.0, states), out)
        if not before:
            base = first(base)
        inner = act(linear(second(base) if before else base, up))
        changed = base + linear(inner, down)
        return changed if before else second(changed)

    return step


OPT_BLOCKS: dict[str, Callable[[Any], FusedBlock | None]] = {"OPTDecoderLayer": opt_block}
