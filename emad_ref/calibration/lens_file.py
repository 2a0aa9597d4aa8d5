"""A fitted tuned lens in a file: safetensors, with what it was fitted on and how well, as JSON in its metadata.

    4.bias [D]   4.full [D, D]                of layer 4, or
    4.bias [D]   4.up [D, r]   4.down [D, r]  of a low rank, A = up·downᵀ
    4.gate [E + 1]                            where a gate was fitted too: weights, and the intercept last

What a file holds is judged before anything is made of it: whatever is wrong with it is one BadLens. That it belongs to
the model at hand is asked where it is attached (``readout.tuned``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emad_ref.calibration.tensor_file import load_tensors, save_tensors
from emad_ref.errors import EmadError
from emad_ref.point import Estimator
from emad_ref.readout.tuned import Translator, TunedLens

SCHEMA = 1
FULL, LOW = ("full",), ("up", "down")  # names of a translator's factors
GATE = "gate"


class BadLens(EmadError):
    """A file that is not a tuned lens as ``save_lens`` wrote it."""


@dataclass(frozen=True, eq=False)
class FittedLens:
    """``lens``; ``plan``: what it was fitted on and how, as ``LensPlan.to_json`` gives it, for the record.

    ``raw_nats``, ``tuned_nats``: layer → mean KL(final ‖ readout) on ``tokens`` positions of documents that were held
    out, of the model's own head and of the lens.
    ``gate``: of all its layers, fitted on those documents (``calibration.gate``), or None.
    """

    lens: TunedLens
    plan: dict[str, Any]
    raw_nats: Mapping[int, float]
    tuned_nats: Mapping[int, float]
    tokens: int
    gate: Estimator | None = None


def save_lens(path: Path, fitted: FittedLens) -> None:
    """Write; the file is complete or as it was. Raises BadFile."""
    save_tensors(path, "lens", *parts_of(fitted))


def load_lens(path: Path | str) -> FittedLens:
    """What ``save_lens`` wrote.

    Raises:
        BadFile: it cannot be read.
        BadLens: it is no safetensors, no lens, of another schema, or holds impossible values.
    """
    return load_tensors(path, "lens", fitted_of, BadLens, writer="emad lens", remedy="fit it again")


# ---------------------------------------------------------------- what other files that hold a lens are made of, too


def parts_of(fitted: FittedLens) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, plain JSON) that ``fitted_of`` makes the same lens of."""
    lens, tensors = fitted.lens, {}
    for layer, translator in lens.translators.items():
        names = FULL if translator.rank is None else LOW
        for name, tensor in zip((*names, "bias"), (*translator.factors, translator.bias), strict=True):
            tensors[f"{layer}.{name}"] = tensor.detach().cpu().contiguous()
    if fitted.gate is not None:
        for layer, weights in zip(lens.translators, fitted.gate.weights, strict=True):
            tensors[f"{layer}.{GATE}"] = torch.tensor(weights, dtype=torch.float64)
    about = {
        "schema": SCHEMA,
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


def fitted_of(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> FittedLens:
    """The lens of ``parts_of``.

    Raises:
        ValueError, KeyError, TypeError: of another schema, tensors or values missing or impossible.
        BadArgument: translators that make no lens.
    """
    if about["schema"] != SCHEMA:
        raise ValueError(f"its schema is {about['schema']!r}, not {SCHEMA}")
    translated, nats = about["translated"], {name: about[name] for name in ("raw_nats", "tuned_nats")}
    texts = all(isinstance(about[name], str) and about[name] for name in ("fingerprint", "dtype"))
    counts = all(type(n) is int and n >= 1 for n in (about["layers"], about["tokens"], *translated))
    if not texts or not counts or not isinstance(about["plan"], dict):
        raise ValueError("its metadata holds values of other types")
    if any(len(values) != len(translated) or not all(map(_is_divergence, values)) for values in nats.values()):
        raise ValueError("its divergences are not one finite number ≥ 0 per layer")
    names = FULL if f"{translated[0]}.{FULL[0]}" in tensors else LOW
    gated = f"{translated[0]}.{GATE}" in tensors
    expected = {f"{layer}.{name}" for layer in translated for name in (*names, "bias", *([GATE] * gated))}
    if set(tensors) != expected:
        raise ValueError(f"tensors {sorted(set(tensors) ^ expected)[:4]} are missing or unknown")
    if not all(
        tensor.dtype in (torch.float32, torch.float64) and tensor.isfinite().all() for tensor in tensors.values()
    ):
        raise ValueError("some of its numbers are not finite, or of another type")
    translators = {
        layer: Translator(tuple(tensors[f"{layer}.{name}"] for name in names), tensors[f"{layer}.bias"])
        for layer in translated
    }
    lens = TunedLens(about["fingerprint"], about["dtype"], about["layers"], translators)
    raw, tuned = (dict(zip(translated, values, strict=True)) for values in nats.values())
    weights = tuple(tuple(tensors[f"{layer}.{GATE}"].tolist()) for layer in translated) if gated else ()
    gate = Estimator("linear", weights=weights) if gated else None
    return FittedLens(lens, about["plan"], raw, tuned, about["tokens"], gate)


def _is_divergence(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
