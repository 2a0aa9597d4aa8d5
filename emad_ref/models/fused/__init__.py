"""Blocks of known families in plain tensor operations: the same arithmetic with a third of the calls.

At batch 1 a small model spends more time entering modules than multiplying. So a forward with a cache, over one or
several queries per row at common or own positions, takes a block's *step* (``operations.FusedBlock``) where there is
one:

``neox``   GPT-NeoX, parallel and sequential
``llama``  Llama and what differs from it by norms, factors and where it turns: Qwen2 and 3, Mistral, SmolLM3, OLMo2, …
``opt``    OPT, norms before or after

The norm in front of the head is a function as well (``fused_norm``), to the bit what its module gives.

The modules stay the oracle: a law (``tests/laws/test_fused.py``) and the stepper's self-check hold these steps to them,
and whatever is not exactly the module that a step was written for (another layer type, a subclass, a hook, a quantised
or replaced layer, another attention kernel) keeps its own forward. A step reads a module's parameters when it is
called, never a copy of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from emad_ref.models.fused import blocks
from emad_ref.models.fused.operations import FusedBlock, Pointwise, layer_norm

FUSED_BLOCKS: dict[str, Callable[[Any], FusedBlock | None]] = {
    **blocks.NEOX_BLOCKS,
    **blocks.LLAMA_BLOCKS,
    **blocks.OPT_BLOCKS,
}
NORMS: dict[str, Callable[[Any], Pointwise]] = {"LayerNorm": layer_norm, **blocks.RMS_NORMS}
# layers that steps compute by themselves, and those that do nothing in eval mode
_PLAIN_MODULES = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh)


def fused_block(block: nn.Module, kernel: str) -> FusedBlock | None:
    """The step of ``block`` for queries with a cache under an attention ``kernel``; None where there is none."""
    maker = FUSED_BLOCKS.get(type(block).__name__)
    return maker(block) if maker is not None and kernel == "sdpa" and _is_unmodified(block) else None


def fused_norm(module: nn.Module) -> Pointwise | None:
    """The norm in front of the head as a function of states [..., D]; None where it is not one known to the bit."""
    maker = NORMS.get(type(module).__name__)
    if maker is None or not _is_unmodified(module):
        return None
    norm = maker(module)
    # a vector is a token alone to a step, and summed in another order
    return lambda states: norm(states) if states.dim() > 1 else norm(states[None])[0]


def _is_unmodified(part: nn.Module) -> bool:
    """Only modules of the part's own source, activations, and PyTorch's; none of them hooked, patched or wrapped."""
    home = type(part).__module__
    if type(part) not in _PLAIN_MODULES and not home.startswith("transformers.models."):
        return False
    for module in part.modules():
        kind = type(module)
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return False
        if kind not in _PLAIN_MODULES and kind.__module__ not in (home, "transformers.activations"):
            return False
        # a patched class computes otherwise under its old name
        if kind not in _PLAIN_MODULES and kind.forward.__module__ != kind.__module__:
            return False
    return True
