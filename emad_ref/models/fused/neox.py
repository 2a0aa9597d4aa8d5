"""GPT-NeoX: parallel residual x + attention(norm₁ x) + mlp(norm₂ x), or the sequential order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emad_ref.models.fused.parts import (
    Given,
    Packed,
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


def gpt_neox(block: Any) -> Step:
    """The step of a ``GPTNeoXLayer``."""
    attention, mlp = block.attention, block.mlp
    first, second = block.input_layernorm, block.post_attention_layernorm
    width, first_eps, second_eps = first.normalized_shape, first.eps, second.eps
    head, scale = attention.head_size, attention.scaling
    index, parallel, act = attention.layer_idx, block.use_parallel_residual, activation(mlp.act)
    norm, inner_norm = parameters(first), parameters(second)
    mix, out = parameters(attention.query_key_value), parameters(attention.dense)
    up, down = parameters(mlp.dense_h_to_4h), parameters(mlp.dense_4h_to_h)

    def step(states: Tensor, given: Given) -> Tensor:
        normed = torch.layer_norm(states, width, norm["weight"], norm["bias"], first_eps)
        assert given.turns is not None
        if torch.is_grad_enabled():
            # each head's output is [query | key | value], so this view costs nothing
            mixed = linear(normed, mix).view(*states.shape[:2], -1, 3, head)
            turn(_turned(mixed, given.turns), given.turns)
            query, key, value = mixed.transpose(1, 2).unbind(3)
        else:
            packed = given.packed(states, (normed.shape[-1] // head, head), _packed)
            linear(normed, mix, packed.whole)
            packed.turn(given.turns)
            query, key, value = packed.query, packed.key, packed.value
        keys, values = given.writer.update(key, value, index)
        change = linear(attended(query, keys, values, given, scale, states), out)
        base = states if parallel else change + states
        normed = torch.layer_norm(base, width, inner_norm["weight"], inner_norm["bias"], second_eps)
        inner = linear(act(linear(normed, up)), down)
        return inner.add_(change).add_(states) if parallel else inner.add_(base)

    return step


def _packed(states: Tensor, turns: Turns, heads: int, head: int) -> Packed:
    whole = buffer_for(states, heads * 3 * head)
    mixed = whole.view(*tokens_of(states), heads, 3, head)
    return Packed(whole, (whole,), _turned(mixed, turns), *mixed.transpose(1, 2).unbind(3))


def _turned(mixed: Tensor, turns: Turns) -> Tensor:
    """What turns of queries and keys: as wide as the tables are, which the config may say narrower."""
    return mixed.narrow(3, 0, 2).narrow(4, 0, turns[0].shape[-1])


MAKERS: dict[str, Callable[[Any], Step | None]] = {"GPTNeoXLayer": gpt_neox}
