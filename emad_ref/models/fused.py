"""One decoding step of a block in plain tensor operations: the same arithmetic with a third of the calls.

At batch 1 a small model spends more time entering modules than multiplying. The modules stay the oracle: a law
(``tests/laws/test_fused.py``) and the stepper's self-check hold these steps to them, and whatever is not exactly the
module this file was written for (another layer type, a hook, another attention kernel) keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Block = Callable[..., Tensor]


def fused(block: nn.Module, kernel: str) -> Block | None:
    """The step of ``block`` for a single query per row with a cache and no mask, or None where there is none."""
    maker = MAKERS.get(type(block).__name__)
    return maker(block) if maker is not None and kernel == "sdpa" and _untouched(block) else None


def _untouched(block: nn.Module) -> bool:
    """Only known modules with weights, none of them hooked, quantised or wrapped."""
    plain = (nn.Linear, nn.LayerNorm)
    for module in block.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return False
        if (
            hasattr(module, "weight") and type(module) not in plain
        ):  # a subclass or a quantised layer computes otherwise
            return False
    return True


def gpt_neox(block: Any) -> Block:
    """GPT-NeoX: parallel residual x + attention(norm₁ x) + mlp(norm₂ x), or the sequential order."""
    attention, mlp = block.attention, block.mlp
    first, second = block.input_layernorm, block.post_attention_layernorm
    width, head, scale, index = first.normalized_shape, attention.head_size, attention.scaling, attention.layer_idx
    parallel, act = block.use_parallel_residual, mlp.act
    mix, out, up, down = attention.query_key_value, attention.dense, mlp.dense_h_to_4h, mlp.dense_4h_to_h

    def step(hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], layer_past: Any, **_: Any) -> Tensor:
        rows, queries, _width = hidden.shape
        normed = F.layer_norm(hidden, width, first.weight, first.bias, first.eps)
        # each head's output is [query | key | value], so this view costs nothing
        mixed = F.linear(normed, mix.weight, mix.bias).view(rows, queries, -1, 3, head)
        cos, sin = (table[:, :, None, None] for table in position_embeddings)
        turned = mixed[..., :2, : cos.shape[-1]]
        left, right = turned.chunk(2, dim=-1)
        turned.copy_(turned * cos + torch.cat((-right, left), dim=-1) * sin)
        query, key, value = mixed.transpose(1, 2).unbind(3)
        keys, values = layer_past.update(key, value, index)
        seen = F.scaled_dot_product_attention(query, keys, values, scale=scale)
        attended = F.linear(seen.transpose(1, 2).reshape(rows, queries, -1), out.weight, out.bias)
        base = hidden if parallel else attended + hidden
        inner = act(F.linear(F.layer_norm(base, width, second.weight, second.bias, second.eps), up.weight, up.bias))
        change = F.linear(inner, down.weight, down.bias)
        return change + attended + hidden if parallel else change + base

    return step


MAKERS: dict[str, Callable[[Any], Block]] = {"GPTNeoXLayer": gpt_neox}
