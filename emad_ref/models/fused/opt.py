"""OPT: norms before attention and MLP, or after them (350m); queries are scaled before attention, not in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from emad_ref.models.fused.beside import Beside
from emad_ref.models.fused.parts import Given, Step, activation, attended, layer_norm, linear, parameters, tokens_of


def opt(block: Any) -> Step:
    """The step of an ``OPTDecoderLayer``."""
    attention, before = block.self_attn, block.do_layer_norm_before
    head, scale, index = attention.head_dim, attention.scaling, attention.layer_idx
    act = activation(block.activation_fn)
    first, second = layer_norm(block.self_attn_layer_norm), layer_norm(block.final_layer_norm)
    mixed = Beside(*(parameters(getattr(attention, f"{name}_proj")) for name in "qkv"))
    out, up, down = parameters(attention.out_proj), parameters(block.fc1), parameters(block.fc2)

    def step(states: Tensor, given: Given) -> Tensor:
        tokens = tokens_of(states)
        normed = first(states) if before else states
        query, key, value = mixed(normed, given)
        query, key, value = (each.view(*tokens, -1, head).transpose(1, 2) for each in (query * scale, key, value))
        keys, values = given.writer.update(key, value, index)
        base = states + linear(attended(query, keys, values, given, 1.0, states), out)
        if not before:
            base = first(base)
        inner = act(linear(second(base) if before else base, up))
        changed = base + linear(inner, down)
        return changed if before else second(changed)

    return step


MAKERS: dict[str, Callable[[Any], Step | None]] = {"OPTDecoderLayer": opt}
