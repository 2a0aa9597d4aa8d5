"""An exit in a file: a tuned lens' safetensors, and what else screening found as JSON in its metadata.

    4.bias [D]   4.full [D, D]   4.gate [E + 1]   as in a lens' file (``calibration.lens_file``)
    4>7.bias [D]   4>7.up [D, r]   4>7.down [D, r]  of state translators (``calibration.translators_file``)
    drafting.gate [E + 1]   drafting.vocabulary int64 [k]      where drafts ask a gate, or read part of the head
    spoken.2.bias [D]   …                         of a lens for drafts, as of the other

``emad screen`` writes it; ``emad generate --exit``, the suites and ``load_exit`` take it. What a file holds is judged
before anything is made of it: whatever is wrong with it is one BadExit. That it belongs to the model at hand is asked
where it is attached (``Exit.attach``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emad_ref.calibration.lens_file import FittedLens, fitted_of, parts_of
from emad_ref.calibration.tensor_file import load_tensors, save_tensors
from emad_ref.calibration.translators_file import NAME, tensors_of, translators_from
from emad_ref.decoding.drafting import Drafting
from emad_ref.errors import EmadError
from emad_ref.point import Estimator
from emad_ref.screening.exit import Exit
from emad_ref.screening.guarantee import Guarantee
from emad_ref.screening.signs import Signs
from emad_ref.wire import points

SCHEMA = 1
GATE, VOCABULARY, SPOKEN = "drafting.gate", "drafting.vocabulary", "spoken."


class BadExit(EmadError):
    """A file that is not an exit as ``save_exit`` wrote it."""


def save_exit(path: Path, found: Exit) -> None:
    """Write; the file is complete or as it was. Raises BadFile."""
    tensors, lens = parts_of(found.fitted)
    about = {
        "exit": SCHEMA,
        "lens": lens,
        "lossy": None if found.lossy is None else points.to_json(found.lossy),
        "why_none": found.why_none,
        "guarantee": None if found.guarantee is None else found.guarantee.to_json(),
        "drafting": None if found.drafting is None else _drafted(found.drafting, tensors),
        "screened": dict(found.screened),
        "signs": None if found.signs is None else found.signs.to_json(),
        "spoken": None if found.spoken is None else _spoken(found.spoken, tensors),
    }
    if found.translators is not None:
        # views of one array would be refused: a file holds each number once
        tensors |= {name: tensor.clone() for name, tensor in tensors_of(found.translators).items()}
    save_tensors(path, "exit", tensors, about)


def load_exit(path: Path | str) -> Exit:
    """What ``save_exit`` wrote.

    Raises:
        BadFile: it cannot be read.
        BadExit: it is no safetensors, no exit, of another schema, or holds impossible values.
    """
    return load_tensors(path, "exit", _exit, BadExit, writer="emad screen", remedy="screen the model again")


def _exit(tensors: dict[str, Tensor], about: Mapping[str, Any]) -> Exit:
    if about.get("exit") != SCHEMA:
        raise ValueError(f"its schema is {about.get('exit')!r}, not {SCHEMA}")
    if not isinstance(about["why_none"], str) or not isinstance(about["screened"], dict):
        raise ValueError("its metadata holds values of other types")
    lossy, promise, drafting = about["lossy"], about["guarantee"], about["drafting"]
    mine = {name: tensors.pop(name) for name in (GATE, VOCABULARY) if name in tensors}
    pairs = {name: tensors.pop(name) for name in list(tensors) if NAME.fullmatch(name)}
    said = {name: tensors.pop(name) for name in list(tensors) if name.startswith(SPOKEN)}
    fitted = fitted_of(tensors, about["lens"])
    spoken = about["spoken"]
    model = fitted.lens.fingerprint, fitted.lens.dtype, fitted.lens.layers
    return Exit(
        fitted,
        None if lossy is None else points.from_json(lossy),
        about["why_none"],
        None if promise is None else Guarantee.from_json(promise),
        None if drafting is None else _drafting(drafting, mine),
        about["screened"],
        None if about["signs"] is None else Signs.from_json(about["signs"]),
        translators_from(*model, pairs) if pairs else None,
        None if spoken is None else fitted_of({name.removeprefix(SPOKEN): said[name] for name in said}, spoken),
    )


def _spoken(fitted: FittedLens, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Plain JSON of a lens for drafts; its arrays go into ``tensors``."""
    held, about = parts_of(fitted)
    tensors |= {f"{SPOKEN}{name}": tensor for name, tensor in held.items()}
    return about


def _drafted(drafting: Drafting, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Plain JSON of a way of drafting; its arrays go into ``tensors``."""
    if drafting.gate is not None:
        tensors[GATE] = torch.tensor(drafting.gate.weights[0], dtype=torch.float64)
    if drafting.vocabulary is not None:
        tensors[VOCABULARY] = torch.from_numpy(drafting.vocabulary.copy())
    always = drafting.threshold == math.inf
    return {
        "layer": drafting.layer,
        "longest": drafting.longest,
        "threshold": None if always else drafting.threshold,  # JSON has no infinity
        "lens": drafting.lens,
        "copied": drafting.copied,
    }


def _drafting(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Drafting:
    if not all(type(about[name]) is int for name in ("layer", "longest", "copied")):
        raise ValueError("its way of drafting holds values of other types")
    gate = Estimator("linear", weights=(tuple(tensors[GATE].tolist()),)) if GATE in tensors else None
    vocabulary = tensors[VOCABULARY].numpy() if VOCABULARY in tensors else None
    threshold = math.inf if about["threshold"] is None else float(about["threshold"])
    return Drafting(about["layer"], about["longest"], threshold, about["lens"], gate, vocabulary, about["copied"])
