"""State translators as named tensors, for a file that holds them beside other things.

    4>7.bias [D]   4>7.up [D, r]   4>7.down [D, r]   of the pair (4, 7), A = up·downᵀ; at rank 0 the bias alone, or
    4>7.bias [D]   4>7.full [D, D]                   of full matrices

Knows no file: whoever writes one adds the model it belongs to. Other names in the same file are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from emad_ref.calibration.lens_file import FULL, LOW
from emad_ref.errors import BadArgument
from emad_ref.readout.states import StateTranslators
from emad_ref.readout.tuned import Translator

NAME = re.compile(r"([1-9][0-9]*)>([1-9][0-9]*)\.([a-z]+)")
BIAS = "bias"


def tensors_of(translators: StateTranslators) -> dict[str, Tensor]:
    """Name → tensor, on the CPU, contiguous."""
    names = {None: FULL, 0: ()}.get(translators.rank, LOW)
    return {
        f"{exit_}>{layer}.{name}": tensor.detach().cpu().contiguous()
        for (exit_, layer), each in translators.pairs.items()
        for name, tensor in zip((*names, BIAS), (*each.factors, each.bias), strict=True)
    }


def translators_from(fingerprint: str, dtype: str, layers: int, tensors: Mapping[str, Tensor]) -> StateTranslators:
    """The inverse of ``tensors_of``, for the model with this ``fingerprint``, ``dtype`` and L ``layers``.

    Raises:
        BadArgument: tensors that make no state translators: missing or unknown parts of a pair, other shapes, numbers
            that are not finite.
    """
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = NAME.fullmatch(name)
        if found is None:
            continue
        if tensor.dtype not in (torch.float32, torch.float64) or not bool(tensor.isfinite().all()):
            raise BadArgument(name, str(tensor.dtype), "finite float32 or float64 numbers", "fit them again")
        parts.setdefault((int(found[1]), int(found[2])), {})[found[3]] = tensor
    pairs = {}
    for pair in sorted(parts):
        held = parts[pair]
        names = next((names for names in ((), FULL, LOW) if set(held) == {*names, BIAS}), None)
        if names is None:
            expected = f"{BIAS} alone, or with {FULL[0]}, or with {' and '.join(LOW)}"
            raise BadArgument(f"{pair[0]}>{pair[1]}", sorted(held), expected, "fit them again")
        pairs[pair] = Translator(tuple(held[name] for name in names), held[BIAS])
    return StateTranslators(fingerprint, dtype, layers, pairs)
