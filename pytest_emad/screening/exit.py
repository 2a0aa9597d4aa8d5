"""A learned exit: all inputs of early-exit decoding besides the model, and its file.

An *exit* holds the tuned lens and its gate, maps for K and V above an exit, one lossy operating point with its
guarantee, and a setting for lossless drafting. It also holds measurements of the screening as plain JSON. Any part may
be missing; without a lossy point the exit holds the reason. Points name lens and maps by digest; ``attach`` gives the
tensors to the model that decodes.

The file is safetensors, with the rest as JSON in its metadata:

    4.bias [D]   4.full [D, D]   4.gate [E + 1]   as in a lens' file (``calibration.lens_files``)
    4>7.bias [D]   4>7.up [D, r]   4>7.down [D, r]  of state translators (``calibration.lens_files``)
    drafting.gate [E + 1]   drafting.vocabulary int64 [k]      if drafts have a gate, or read part of the head
    spoken.2.bias [D]   …                         of a lens for drafts, in the same form

``emad screen`` writes it; ``emad generate --exit``, the suites and ``load_exit`` read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from emad_ref.absent import Absent, reason_if_absent
from emad_ref.calibration.lens_files import (
    PAIR_NAME,
    FittedLens,
    lens_from_tensors,
    lens_to_tensors,
    state_translators_from_tensors,
    state_translators_to_tensors,
)
from emad_ref.decoding.custom_generate import adaptive
from emad_ref.decoding.self_speculation import Drafting, DraftLengths
from emad_ref.errors import BadArgument, EmadError
from emad_ref.file_formats import FileFormat
from emad_ref.models.loading import LoadedModel
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.probes.tuned_lens import StateTranslators, attach_lens, attach_translators
from pytest_emad.remote import json_fields
from pytest_emad.screening.drift import DocumentFeatures
from pytest_emad.screening.guarantee import Guarantee


@dataclass(frozen=True, eq=False)
class Exit:
    """A learned exit. ``fitted``: the lens and its gate. ``lossy``: the recommended point, or why there is none.

    ``leave_early``: whether screening advises to decode at ``lossy``: faster than full depth on its machine, and not
    shown to lose more than allowed in text of its own. ``guarantee``: the guarantee of ``lossy``, or None.
    ``drafting``: setting of lossless self-speculation; None if it is not clearly faster. ``screened``: tables and
    provenance as plain JSON, only for the record. ``translators``: of states above an exit, if ``lossy`` fills K and V
    with them. ``signs``: features at ``lossy`` of the documents that ``guarantee`` was certified on, the reference of
    ``emad drift``. ``spoken``: a lens for drafts, fitted on the model's own text (``fit_draft_lens``), if drafts use
    one.

    Raises:
        BadArgument: a point or a draft of another model or lens; a promise about another point.
    """

    fitted: FittedLens
    lossy: OperatingPoint | Absent
    guarantee: Guarantee | None = None
    drafting: Drafting | None = None
    screened: Mapping[str, Any] = field(default_factory=dict)
    signs: DocumentFeatures | None = None
    leave_early: bool = False
    translators: StateTranslators | None = None
    spoken: FittedLens | None = None

    def __post_init__(self) -> None:
        lossy = None if isinstance(self.lossy, Absent) else self.lossy
        if lossy is not None:
            self._require_own(lossy)
        if self.guarantee is not None and self.guarantee.chosen_point is not None:
            own = None if lossy is None else lossy.digest
            if self.guarantee.chosen_point != own:
                expected = f"{None if lossy is None else lossy.name!r}, the point that is recommended"
                raise BadArgument("exit.guarantee.chosen", self.guarantee.chosen, expected)
        if self.drafting is not None:
            self.drafting.require_fits_model(self.fitted.lens.layers)
            self._require_lens("drafting", self.drafting.lens, self.spoken)

    def _require_own(self, point: OperatingPoint) -> None:
        if point.layers != self.fitted.lens.layers:
            raise BadArgument("exit.lossy.layers", point.layers, f"{self.fitted.lens.layers}, the layers of its lens")
        self._require_lens("lossy", point.lens)
        own = None if self.translators is None else self.translators.digest
        if point.translators not in (None, own):
            raise BadArgument("exit.lossy.translators", point.translators, "None, or the digest of its own translators")

    def _require_lens(self, part: str, digest: str | None, other: FittedLens | None = None) -> None:
        own = {self.fitted.lens.digest} | ({other.lens.digest} if other is not None else set())
        if digest is not None and digest not in own:
            raise BadArgument(f"exit.{part}.lens", digest, "None, or the digest of its own lens")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the exit's model."""
        return self.fitted.lens.fingerprint

    @property
    def point(self) -> OperatingPoint:
        """The lossy point, or full depth without one."""
        return full_depth(self.fitted.lens.layers) if isinstance(self.lossy, Absent) else self.lossy

    def attach(self, model: LoadedModel) -> Exit:
        """Attach lens and translators to ``model`` for the life of its stepper; returns the exit.

        Raises:
            BadArgument: another model, dtype, number of layers or width than the exit was made for.
        """
        attach_lens(model.stepper, self.fitted.lens, model.fingerprint)
        if self.spoken is not None:
            attach_lens(model.stepper, self.spoken.lens, model.fingerprint)
        if self.translators is not None:
            attach_translators(model.stepper, self.translators, model.fingerprint)
        return self

    def custom_generate(self, model: LoadedModel, *, streamer: BaseStreamer | None = None) -> Callable[..., Any]:
        """The ``custom_generate`` argument of ``model.model.generate`` that decodes at ``point``.

        Raises:
            BadArgument: as ``attach``.
        """
        return adaptive(self.attach(model).point, loaded=model, streamer=streamer)


GATE_TENSOR, VOCABULARY_TENSOR, DRAFT_LENS_PREFIX = "drafting.gate", "drafting.vocabulary", "spoken."


class BadExit(EmadError):
    """Raised for a file that is not an exit as ``save_exit`` writes it."""


EXIT = FileFormat("exit", 5, "screen the model again with `emad screen`", BadExit)


def save_exit(path: Path, learned: Exit) -> None:
    """Write the exit to ``path``; the file is complete or unchanged. Raises BadFile."""
    tensors, lens = lens_to_tensors(learned.fitted)
    about = {
        "lens": lens,
        "lossy": None if isinstance(learned.lossy, Absent) else json_fields.point_to_json(learned.lossy),
        "why_none": reason_if_absent(learned.lossy),
        "leave_early": learned.leave_early,
        "guarantee": None if learned.guarantee is None else learned.guarantee.to_json(),
        "drafting": None if learned.drafting is None else _drafting_json(learned.drafting, tensors),
        "screened": dict(learned.screened),
        "signs": None if learned.signs is None else learned.signs.to_json(),
        "spoken": None if learned.spoken is None else _draft_lens_json(learned.spoken, tensors),
    }
    if learned.translators is not None:
        # safetensors refuses views of one array
        tensors |= {name: tensor.clone() for name, tensor in state_translators_to_tensors(learned.translators).items()}
    EXIT.write_tensors(path, tensors, about)


def load_exit(path: Path | str) -> Exit:
    """Load a learned exit.

    Parameters
    ----------
    path : Path
        A file of ``save_exit`` or ``emad screen``: safetensors, with JSON in its metadata.

    Returns
    -------
    Exit
        The exit; call its ``attach`` before decoding.

    Raises
    ------
    BadExit
        The file cannot be read, is no exit, is of another schema, or was changed after it was written.
    """
    tensors, about = EXIT.read_tensors(path)
    fitted, spoken = lens_from_tensors(tensors, about["lens"]), about["spoken"]
    of_drafts = {
        name.removeprefix(DRAFT_LENS_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(DRAFT_LENS_PREFIX)
    }
    lossy, promise, drafting, signs = (about[name] for name in ("lossy", "guarantee", "drafting", "signs"))
    pairs = {name: tensor for name, tensor in tensors.items() if PAIR_NAME.fullmatch(name)}
    model = fitted.lens.fingerprint, fitted.lens.dtype, fitted.lens.layers
    return Exit(
        fitted,
        Absent(about["why_none"]) if lossy is None else json_fields.point_from_json(lossy),
        None if promise is None else Guarantee.from_json(promise),
        None if drafting is None else _parse_drafting(drafting, tensors),
        about["screened"],
        None if signs is None else DocumentFeatures.from_json(signs),
        about["leave_early"],
        state_translators_from_tensors(*model, pairs) if pairs else None,
        None if spoken is None else lens_from_tensors(of_drafts, spoken),
    )


def _draft_lens_json(fitted: FittedLens, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Plain JSON of a lens for drafts; its arrays are added to ``tensors``."""
    lens_arrays, about = lens_to_tensors(fitted)
    tensors |= {f"{DRAFT_LENS_PREFIX}{name}": tensor for name, tensor in lens_arrays.items()}
    return about


def _drafting_json(drafting: Drafting, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Plain JSON of a drafting setting; its arrays are added to ``tensors``."""
    if drafting.gate is not None:
        tensors[GATE_TENSOR] = torch.tensor(drafting.gate.weights[0], dtype=torch.float64)
    if drafting.vocabulary is not None:
        tensors[VOCABULARY_TENSOR] = torch.from_numpy(drafting.vocabulary.copy())
    always = drafting.threshold == math.inf
    return {
        "layer": drafting.layer,
        "longest": drafting.longest,
        "threshold": None if always else drafting.threshold,  # JSON has no infinity
        "lens": drafting.lens,
        "copied": drafting.copied,
        "by_rows": None if drafting.by_rows is None else [lengths._asdict() for lengths in drafting.by_rows],
    }


def _parse_drafting(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Drafting:
    gate = (
        EntropyEstimator("linear", weights=(tuple(tensors[GATE_TENSOR].tolist()),)) if GATE_TENSOR in tensors else None
    )
    vocabulary = tensors[VOCABULARY_TENSOR].numpy() if VOCABULARY_TENSOR in tensors else None
    threshold = math.inf if about["threshold"] is None else float(about["threshold"])
    by_rows = None if about["by_rows"] is None else tuple(DraftLengths(**lengths) for lengths in about["by_rows"])
    return Drafting(
        about["layer"], about["longest"], threshold, about["lens"], gate, vocabulary, about["copied"], by_rows
    )
