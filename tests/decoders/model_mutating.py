"""Decoders that change the weights of the judge's model but report everything else honestly.

``CHANGES`` maps the name of a defect to the change and to the name of the tensor that the error must name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GPTNeoXForCausalLM

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


def put_another_weight_in_its_place(model: Any) -> None:
    layer = model.gpt_neox.layers[1].attention.dense
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a weight in place": (change_a_weight, "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"),
    "upper layers zeroed": (zero_the_upper_half, "gpt_neox.layers.2.attention.dense.weight"),
    "another weight in its place": (put_another_weight_in_its_place, "gpt_neox.layers.1.attention.dense.weight"),
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
