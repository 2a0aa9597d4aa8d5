"""Files of tuned lenses and state translators: safetensors, with JSON in the metadata.

4.bias [D]   4.full [D, D]                        a lens at layer 4, or
4.bias [D]   4.up [D, r]   4.down [D, r]          of a low rank, A = up·downᵀ
4.gate [E + 1]                                    if a gate was fitted too: weights, and the intercept last
4>7.bias [D]   4>7.up [D, r]   4>7.down [D, r]    the translator of the pair (4, 7); at rank 0 the bias alone
4>7.bias [D]   4>7.full [D, D]                    of a full matrix
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emad_ref.errors import EmadError
from emad_ref.file_formats import FileFormat
from emad_ref.point import EntropyEstimator
from emad_ref.probes.tuned_lens import StateTranslators, Translator, TunedLens

FULL, LOW = ("full",), ("up", "down")  # names of a translator's factors
GATE = "gate"


class BadLens(EmadError):
    """Raised for a file that is not a tuned lens as ``save_lens`` writes it."""


LENS = FileFormat("lens", 2, "fit it again with `emad lens`", BadLens)


@dataclass(frozen=True, eq=False)
class FittedLens:
    """A fitted ``lens``; ``plan``: how it was fitted (``LensPlan.to_json``), for the record.

    ``raw_nats``, ``tuned_nats``: layer → mean KL(final ‖ readout) on ``tokens`` positions of held-out documents, for
    the model's own head and for the lens. ``gate``: at all its layers, fitted on those documents (``fit_gate``), or
    None.
    """

    lens: TunedLens
    plan: dict[str, Any]
    raw_nats: Mapping[int, float]
    tuned_nats: Mapping[int, float]
    tokens: int
    gate: EntropyEstimator | None = None


def save_lens(path: Path, fitted: FittedLens) -> None:
    """Write the lens; the file is complete or unchanged. Raises BadFile."""
    LENS.write_tensors(path, *lens_to_tensors(fitted))


def load_lens(path: Path | str) -> FittedLens:
    """Load a tuned lens.

    Parameters
    ----------
    path : Path
        A file of ``save_lens`` or ``emad lens``: safetensors, with JSON in its metadata.

    Returns
    -------
    FittedLens
        The lens, its gate if it has one, its plan and its held-out divergences in nats.

    Raises
    ------
    BadLens
        The file cannot be read, is no lens, is of another schema, or was changed after it was written.
    """
    return lens_from_tensors(*LENS.read_tensors(path))


# ---------------------------------------------------------------- parts shared with other files that hold a lens


def lens_to_tensors(fitted: FittedLens) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, plain JSON), the input of ``lens_from_tensors``."""
    lens, tensors = fitted.lens, {}
    for layer, translator in lens.translators.items():
        names = FULL if translator.rank is None else LOW
        for name, tensor in zip((*names, "bias"), (*translator.factors, translator.bias), strict=True):
            tensors[f"{layer}.{name}"] = tensor.detach().cpu().contiguous()
    if fitted.gate is not None:
        for layer, weights in zip(lens.translators, fitted.gate.weights, strict=True):
            tensors[f"{layer}.{GATE}"] = torch.tensor(weights, dtype=torch.float64)
    about = {
        "fingerprint": lens.fingerprint,
        "dtype": lens.dtype,
        "layers": lens.layers,
        "translated": list(lens.translators),
        "raw_nats": list(fitted.raw_nats.values()),
        "tuned_nats": list(fitted.tuned_nats.values()),
        "tokens": fitted.tokens,
        "plan": fitted.plan,
    }
    return tensors, about


def lens_from_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> FittedLens:
    """The lens from the output of ``lens_to_tensors``."""
    translated = about["translated"]
    names = FULL if f"{translated[0]}.{FULL[0]}" in tensors else LOW
    translators = {
        layer: Translator(tuple(tensors[f"{layer}.{name}"] for name in names), tensors[f"{layer}.bias"])
        for layer in translated
    }
    lens = TunedLens(about["fingerprint"], about["dtype"], about["layers"], translators)
    raw, tuned = (dict(zip(translated, about[name], strict=True)) for name in ("raw_nats", "tuned_nats"))
    gate = None
    if f"{translated[0]}.{GATE}" in tensors:
        gate = EntropyEstimator("linear", weights=tuple(tuple(tensors[f"{at}.{GATE}"].tolist()) for at in translated))
    return FittedLens(lens, about["plan"], raw, tuned, about["tokens"], gate)


PAIR_NAME = re.compile(r"([1-9][0-9]*)>([1-9][0-9]*)\.([a-z]+)")
BIAS = "bias"


def state_translators_to_tensors(translators: StateTranslators) -> dict[str, Tensor]:
    """Name → tensor, on the CPU, contiguous."""
    names = {None: FULL, 0: ()}.get(translators.rank, LOW)
    return {
        f"{exit_}>{layer}.{name}": tensor.detach().cpu().contiguous()
        for (exit_, layer), each in translators.pairs.items()
        for name, tensor in zip((*names, BIAS), (*each.factors, each.bias), strict=True)
    }


def state_translators_from_tensors(
    fingerprint: str, dtype: str, layers: int, tensors: Mapping[str, Tensor]
) -> StateTranslators:
    """The inverse of ``state_translators_to_tensors``, for the model with this ``fingerprint``, ``dtype`` and L
    ``layers``.
    """
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := PAIR_NAME.fullmatch(name):
            parts.setdefault((int(match[1]), int(match[2])), {})[match[3]] = tensor
    pairs = {
        pair: Translator(tuple(factors[name] for name in (*FULL, *LOW) if name in factors), factors[BIAS])
        for pair, factors in sorted(parts.items())
    }
    return StateTranslators(fingerprint, dtype, layers, pairs)
