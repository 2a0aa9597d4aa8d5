"""Decoders that change the judge's model or its process but report everything else honestly.

``CHANGES`` and ``AROUND`` map the name of a defect to the change and to the words of the error that must name it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GPTNeoXForCausalLM

from emad_ref.mutants.environment_defects import (
    add_torch_thread,
    halve_clock_speed,
    set_default_dtype_float64,
    sleep_briefly,
    slow_down_functional_linear,
)
from emad_ref.point import OperatingPoint
from tests.decoders.cached_decoder import CachedDecoder


def other_models(mine: nn.Module) -> list[Any]:
    """Return every model of the process except the decoder's own; the protocol gives no access to them."""
    found = [each for each in gc.get_objects() if type(each) is GPTNeoXForCausalLM and each is not mine]
    assert found, "the judge's model was not found"
    return found


def change_a_weight(model: Any) -> None:
    model.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.data[3, 5] += 1


def zero_the_upper_half(model: Any) -> None:
    for block in model.gpt_neox.layers[len(model.gpt_neox.layers) // 2 :]:
        for matrix in (block.attention.dense, block.mlp.dense_4h_to_h):
            matrix.weight.data.zero_()
            matrix.bias.data.zero_()


def turn_the_positions(model: Any) -> None:
    model.gpt_neox.rotary_emb.inv_freq.mul_(2)


def leave_a_hook(model: Any) -> None:
    model.gpt_neox.layers[0].register_forward_hook(lambda module, given, out: None)


def slow_the_baseline(model: Any) -> None:
    model.gpt_neox.layers[2].register_forward_pre_hook(sleep_briefly)


def replace_a_forward(model: Any) -> None:
    block = model.gpt_neox.layers[1]
    block.forward = lambda hidden, *given, **named: hidden


def put_another_weight_in_its_place(model: Any) -> None:
    layer = model.gpt_neox.layers[1].attention.dense
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def do_without_a_cache(model: Any) -> None:
    model.generation_config.use_cache = False


def train(model: Any) -> None:
    model.gpt_neox.layers[0].train()


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a weight in place": (change_a_weight, "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"),
    "upper layers zeroed": (zero_the_upper_half, "gpt_neox.layers.2.attention.dense.weight"),
    "positions turned": (turn_the_positions, "gpt_neox.rotary_emb.inv_freq"),
    "another weight in its place": (put_another_weight_in_its_place, "gpt_neox.layers.1.attention.dense.weight"),
    "a hook left": (leave_a_hook, "gpt_neox.layers.0 (forward hooks)"),
    "a hook that sleeps": (slow_the_baseline, "gpt_neox.layers.2 (forward pre hooks)"),
    "a forward replaced": (replace_a_forward, "gpt_neox.layers.1 (forward)"),
    "generate without a cache": (do_without_a_cache, "generation_config"),
    "training mode": (train, "gpt_neox.layers.0 (training mode)"),
}


def a_hook_on_every_module() -> None:
    nn.modules.module.register_module_forward_pre_hook(sleep_briefly)


def slow_products() -> None:
    """Slow fused steps, which do not call ``F.linear``."""
    multiply = torch.mv

    def mv(*given: Any, **named: Any) -> torch.Tensor:
        time.sleep(1e-4)
        return multiply(*given, **named)

    torch.mv = mv  # type: ignore[assignment]  # as a tired engineer would


AROUND: dict[str, tuple[Callable[[], None], str]] = {
    "threads": (add_torch_thread, "torch.set_num_threads"),
    "default dtype": (set_default_dtype_float64, "torch.set_default_dtype"),
    "a slow linear": (slow_down_functional_linear, "linear was replaced"),
    "slow products": (slow_products, "torch.mv was replaced"),
    "a clock that runs late": (halve_clock_speed, "perf_counter was replaced"),
    "a hook on every module": (a_hook_on_every_module, "_global_forward_pre_hooks"),
}


def meddling(change: Callable[[Any], None], only: nn.Module | None = None) -> type[CachedDecoder]:
    """Return an honest decoder that does ``change`` to every other model of the process, or to ``only`` of them.

    Without ``only``, models that other tests of the process share are changed permanently.
    """

    class Meddling(CachedDecoder):
        def __init__(self, model: GPTNeoXForCausalLM, point: OperatingPoint):
            super().__init__(model, point)
            for other in other_models(model):
                if only is None or other is only:
                    change(other)

    return Meddling


def careless(change: Callable[[], None]) -> type[CachedDecoder]:
    """Return an honest decoder that does ``change`` to the process."""

    class Careless(CachedDecoder):
        def __init__(self, model: GPTNeoXForCausalLM, point: OperatingPoint):
            super().__init__(model, point)
            change()

    return Careless
