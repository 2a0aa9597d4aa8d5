"""Files of tuned lenses and state translators: safetensors, with JSON in the metadata.

4.bias [D]   4.full [D, D]                        a lens at layer 4, or
4.bias [D]   4.up [D, r]   4.down [D, r]          of a low rank, A = up·downᵀ
4.gate [E + 1]                                    if a gate was fitted too: weights, and the intercept last
4>7.bias [D]   4>7.up [D, r]   4>7.down [D, r]    the translator of the pair (4, 7); at rank 0 the bias alone
4>7.bias [D]   4>7.full [D, D]                    of a full matrix
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emad_ref.calibration.tensor_files import build_from_tensor_file, save_tensors
from emad_ref.errors import BadArgument, EmadError, is_number, is_whole
from emad_ref.point import EntropyEstimator
from emad_ref.probes.tuned_lens import StateTranslators, Translator, TunedLens

LENS_SCHEMA = 1
FULL, LOW = ("full",), ("up", "down")  # names of a translator's factors
GATE = "gate"


class BadLens(EmadError):
    """Raised for a file that is not a tuned lens as ``save_lens`` writes it."""


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
    save_tensors(path, "lens", *lens_to_tensors(fitted))


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
    BadFile
        The file cannot be read.
    BadLens
        The file is no safetensors, no lens, of another schema, or holds impossible values.
    """
    return build_from_tensor_file(path, "lens", lens_from_tensors, BadLens, writer="emad lens", remedy="fit it again")


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
        "schema": LENS_SCHEMA,
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
    """The lens from the output of ``lens_to_tensors``.

    Raises:
        ValueError, KeyError, TypeError: of another schema, tensors or values missing or impossible.
        BadArgument: translators that do not fit together.
    """
    if not is_whole(about["schema"]) or about["schema"] != LENS_SCHEMA:
        raise ValueError(f"its schema is {about['schema']!r}, not {LENS_SCHEMA}")
    translated, nats = about["translated"], {name: about[name] for name in ("raw_nats", "tuned_nats")}
    texts = all(isinstance(about[name], str) and about[name] for name in ("fingerprint", "dtype"))
    counts = all(is_whole(n) and n >= 1 for n in (about["layers"], about["tokens"], *translated))
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
    if gated and any(tensors[f"{layer}.{GATE}"].ndim != 1 for layer in translated):
        raise ValueError("a gate is no row of numbers")
    translators = {
        layer: Translator(tuple(tensors[f"{layer}.{name}"] for name in names), tensors[f"{layer}.bias"])
        for layer in translated
    }
    lens = TunedLens(about["fingerprint"], about["dtype"], about["layers"], translators)
    raw, tuned = (dict(zip(translated, values, strict=True)) for values in nats.values())
    weights = tuple(tuple(tensors[f"{layer}.{GATE}"].tolist()) for layer in translated) if gated else ()
    gate = EntropyEstimator("linear", weights=weights) if gated else None
    return FittedLens(lens, about["plan"], raw, tuned, about["tokens"], gate)


def _is_divergence(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and value >= 0


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

    Raises:
        BadArgument: missing or unknown parts of a pair, other shapes, or numbers that are not finite.
    """
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = PAIR_NAME.fullmatch(name)
        if match is None:
            continue
        if tensor.dtype not in (torch.float32, torch.float64) or not bool(tensor.isfinite().all()):
            raise BadArgument(name, str(tensor.dtype), "finite float32 or float64 numbers", "fit them again")
        parts.setdefault((int(match[1]), int(match[2])), {})[match[3]] = tensor
    pairs = {}
    for pair in sorted(parts):
        factors = parts[pair]
        names = next((names for names in ((), FULL, LOW) if set(factors) == {*names, BIAS}), None)
        if names is None:
            expected = f"{BIAS} alone, or with {FULL[0]}, or with {' and '.join(LOW)}"
            raise BadArgument(f"{pair[0]}>{pair[1]}", sorted(factors), expected, "fit them again")
        pairs[pair] = Translator(tuple(factors[name] for name in names), factors[BIAS])
    return StateTranslators(fingerprint, dtype, layers, pairs)
