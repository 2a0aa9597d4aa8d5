"""Llama and its kin: RMSNorm, one key for several query heads, a gated MLP.

    h ← h + c · post₁(attention(pre₁ h))
    h ← h + c · post₂(down(act(gate x) · up x)),  x = pre₂ h

A family says which of the four norms it has (``Names``), what its RMSNorm rounds when, whether queries and keys are
normed (by the shape of the norm: over a head or over all of them), and its factor c. Which keys a query sees is the
mask's matter, so sliding windows are; a layer without positions (SmolLM3) says so itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emad_ref.models.fused.beside import Beside
from emad_ref.models.fused.parts import (
    Given,
    Packed,
    Pointwise,
    Step,
    Turns,
    activation,
    attended,
    buffer_for,
    linear,
    parameters,
    tokens_of,
    turn,
)


class Names(NamedTuple):
    """Attributes of a block that hold its norms, None where it has none; ``norm`` makes one a function."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    norm: Callable[[Any], Pointwise]


def llama(names: Names, block: Any) -> Step:
    """The step of a decoder layer like Llama's."""
    attention, mlp = block.self_attn, block.mlp
    head, scale, index, act = attention.head_dim, attention.scaling, attention.layer_idx, activation(mlp.act_fn)
    first, after_first = (_norm_of(block, names.norm, name) for name in (names.before_attention, names.after_attention))
    second, after_second = (_norm_of(block, names.norm, name) for name in (names.before_mlp, names.after_mlp))
    query_norm, key_norm = (_norm_of(attention, names.norm, name) for name in ("q_norm", "k_norm"))
    turns, factor = getattr(attention, "use_rope", True), getattr(block, "residual_multiplier", None)
    mixed = Beside(*(parameters(getattr(attention, f"{name}_proj")) for name in "qkv"))
    widened = Beside(parameters(mlp.gate_proj), parameters(mlp.up_proj))
    out, down = parameters(attention.o_proj), parameters(mlp.down_proj)
    sizes = (*mixed.sizes[:2], head)
    whole = query_norm is not None and attention.q_norm.weight.shape[0] != head

    def heads(projected: Tensor, norm: Pointwise | None, tokens: tuple[int, int]) -> Tensor:
        if norm is not None and whole:
            projected = norm(projected)
        split = projected.view(*tokens, -1, head)
        return norm(split) if norm is not None and not whole else split

    def step(states: Tensor, given: Given) -> Tensor:
        normed = states if first is None else first(states)
        if query_norm is None and not torch.is_grad_enabled():
            packed = given.packed(states, sizes, _packed)
            mixed.write(normed, packed)
            query, key, value = packed.query, packed.key, packed.value
            if turns:
                assert given.turns is not None
                packed.turn(given.turns)
        else:
            tokens = tokens_of(states)
            projected = zip(mixed(normed, given), (query_norm, key_norm, None), strict=True)
            query, key, value = (heads(each, norm, tokens) for each, norm in projected)
            if turns:
                assert given.turns is not None
                both = turn(torch.cat((query, key), dim=2).unsqueeze(3), given.turns).squeeze(3)
                query, key = both.split((query.shape[2], key.shape[2]), dim=2)
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        keys, values = given.writer.update(key, value, index)
        change = linear(attended(query, keys, values, given, scale, states), out)
        base = _joined(states, change if after_first is None else after_first(change), factor)
        normed = base if second is None else second(base)
        gate, up = widened(normed, given)
        change = linear(act(gate) * up, down)
        return _joined(base, change if after_second is None else after_second(change), factor)

    return step


def _packed(states: Tensor, _turns: Turns | None, queries: int, keys: int, head: int) -> Packed:
    """All heads of the queries, of the keys, of the values."""
    whole, tokens = buffer_for(states, queries + 2 * keys), tokens_of(states)
    written = whole.split((queries, keys, keys), dim=-1)
    query, key, value = (each.view(*tokens, -1, head).transpose(1, 2) for each in written)
    turned = whole.narrow(-1, 0, queries + keys).view(*tokens, -1, 1, head)
    return Packed(whole, tuple(written), turned, query, key, value)


def _joined(hidden: Tensor, change: Tensor, factor: float | None) -> Tensor:
    return change.add_(hidden) if factor is None else hidden + change * factor


def _norm_of(owner: Any, norm: Callable[[Any], Pointwise], name: str | None) -> Pointwise | None:
    return None if name is None or not hasattr(owner, name) else norm(getattr(owner, name))


def rounded_first(module: Any) -> Pointwise:
    """Llama's RMSNorm: the float32 quotient is rounded to the model's dtype before it meets the weight."""
    quotient, own = _quotient(module, module.variance_epsilon), parameters(module)
    return lambda states: own["weight"] * quotient(states).to(states.dtype)


def rounded_last(module: Any) -> Pointwise:
    """OLMo2's RMSNorm: weight and quotient meet before the product is rounded."""
    quotient, own = _quotient(module, module.variance_epsilon), parameters(module)
    return lambda states: (own["weight"] * quotient(states)).to(states.dtype)


def one_more(module: Any) -> Pointwise:
    """Gemma's RMSNorm: the weight counts from one, in float32."""
    quotient, own = _quotient(module, module.eps), parameters(module)
    return lambda states: (quotient(states) * (1.0 + own["weight"].float())).to(states.dtype)


def _quotient(module: Any, eps: float) -> Pointwise:
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
    return tuple(parameters(module)["weight"].shape)


NORMS: dict[str, Callable[[Any], Pointwise]] = {
    "LlamaRMSNorm": rounded_first,
    "Qwen2RMSNorm": rounded_first,
    "Qwen3RMSNorm": rounded_first,
    "MistralRMSNorm": rounded_first,
    "SmolLM3RMSNorm": rounded_first,
    "GraniteRMSNorm": rounded_first,
    "GemmaRMSNorm": one_more,
    "Gemma3RMSNorm": one_more,
    "Olmo2RMSNorm": rounded_last,
}
_BEFORE = Names("input_layernorm", None, "post_attention_layernorm", None, rounded_first)
_AFTER = Names(None, "post_attention_layernorm", None, "post_feedforward_layernorm", rounded_last)
_AROUND = Names(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    one_more,
)
MAKERS: dict[str, Callable[[Any], Step | None]] = {
    "LlamaDecoderLayer": partial(llama, _BEFORE),
    "Qwen2DecoderLayer": partial(llama, _BEFORE),
    "Qwen3DecoderLayer": partial(llama, _BEFORE),
    "MistralDecoderLayer": partial(llama, _BEFORE),
    "SmolLM3DecoderLayer": partial(llama, _BEFORE),
    "GraniteDecoderLayer": partial(llama, _BEFORE),
    "GemmaDecoderLayer": partial(llama, _BEFORE._replace(norm=one_more)),
    "Gemma3DecoderLayer": partial(llama, _AROUND),
    "Olmo2DecoderLayer": partial(llama, _AFTER),
}
