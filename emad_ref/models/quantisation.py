"""Int8 copies of a model: weights of the blocks in eight bits, activations quantised dynamically or not at all.

EMAD, "Composability": depth is orthogonal to quantisation.

PyTorch's dynamic quantisation on the CPU has one scale per tensor of activations, so the result for a token depends on
the other tokens of the forward. Decoding one token at a time then differs from one plain pass, and the copy's own
token-by-token full depth is its reference (``calibration.trace.trace_stepwise``). Embedding, norms and head stay
unchanged, so both have the same readout.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import warnings
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from transformers.pytorch_utils import Conv1D

from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.families import anatomy_of
from emad_ref.models.loading import LoadedModel, copy_in_dtype


def int8_copy(loaded: LoadedModel) -> LoadedModel:
    """``loaded`` with the linear layers of its blocks in int8, under the name ``NAME int8``; the original is untouched.

    Raises:
        BadArgument: a model that is not float32 on the CPU, or whose blocks have no ``nn.Linear`` to quantise.
    """
    weight = next(loaded.model.parameters())
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise BadArgument("model", f"{weight.dtype} on {weight.device}", "float32 on the CPU", "load it so")
    model = copy.deepcopy(loaded.model)
    decoder, anatomy = model.get_decoder(), anatomy_of(model.config.get_text_config())
    with warnings.catch_warnings():  # its maintained successor, torchao, is an extra dependency, for GPUs
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        blocks = quantize_dynamic(getattr(decoder, anatomy.blocks), {nn.Linear}, dtype=torch.qint8)
    if not any(isinstance(module, torch.ao.nn.quantized.dynamic.Linear) for module in blocks.modules()):
        raise BadArgument("model", loaded.name, "blocks made of nn.Linear", "GPT-2's Conv1D has no int8 kernel here")
    setattr(decoder, anatomy.blocks, blocks)
    int8 = dataclasses.replace(
        loaded,
        name=f"{loaded.name} int8",
        model=model,
        fingerprint=hashlib.sha256(f"int8 {loaded.fingerprint}".encode()).hexdigest(),
        provenance={**loaded.provenance, "quantised": "int8 dynamic, blocks only"},
    )
    # cached steps and a plain pass differ by quantisation noise: the layers were checked on the original
    int8.__dict__["stepper"] = CausalStepper(model, check=False)
    return int8


@torch.no_grad()
def copy_with_int8_weights(model: Any) -> Any:
    """A float32 copy of a Transformers ``model`` whose weights have 255 values an output channel, for any family.

    Each channel is rounded to the nearest multiples of its largest weight / 127; computation stays in float32, so this
    is a model of precision W8 and needs no kernel. Embeddings, head, norms and biases stay unchanged.
    """
    copied = copy_in_dtype(model, torch.float32)
    kept = [module for module in copied.modules() if isinstance(module, nn.Embedding)]
    kept += [] if (head := copied.get_output_embeddings()) is None else [head]
    unchanged = {id(weight) for module in kept for weight in module.parameters()}
    for module in copied.modules():
        for weight in module.parameters(recurse=False):
            if weight.ndim > 1 and id(weight) not in unchanged:
                largest = weight.abs().amax(0 if isinstance(module, Conv1D) else -1, keepdim=True)  # Conv1D: [in, out]
                step = largest.clamp_min(torch.finfo(weight.dtype).tiny) / 127
                weight.copy_((weight / step).round() * step)
    return copied
