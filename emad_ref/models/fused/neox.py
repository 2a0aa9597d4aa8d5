"""GPT-NeoX: parallel residual x + attention(norm₁ x) + mlp(norm₂ x), or the sequential order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from emad_ref.models.fused.parts import Given, Step, activation, attended, parameters, turn


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

    def step(hidden: Tensor, given: Given) -> Tensor:
        rows, queries, _width = hidden.shape
        normed = torch.layer_norm(hidden, width, norm["weight"], norm["bias"], first_eps)
        # each head's output is [query | key | value], so this view costs nothing
        mixed = F.linear(normed, mix["weight"], mix["bias"]).view(rows, queries, -1, 3, head)
        assert given.turns is not None
        # as wide as the tables are: of an odd share of a head they are wider than the config says
        turn(mixed[..., :2, : given.turns[0].shape[-1]], given.turns)
        query, key, value = mixed.transpose(1, 2).unbind(3)
        keys, values = given.writer.update(key, value, index)
        change = F.linear(attended(query, keys, values, given, scale), out["weight"], out["bias"])
        base = hidden if parallel else change + hidden
        normed = torch.layer_norm(base, width, inner_norm["weight"], inner_norm["bias"], second_eps)
        inner = F.linear(act(F.linear(normed, up["weight"], up["bias"])), down["weight"], down["bias"])
        return inner + change + hidden if parallel else inner + base

    return step


MAKERS: dict[str, Callable[[Any], Step | None]] = {"GPTNeoXLayer": gpt_neox}
