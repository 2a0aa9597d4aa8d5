"""Tensors that points name by digest, held beside the stepper that walks their model, as long as it lives.

A point stays a small value; what it names lies here, once, on the model's device. Knows neither what is held nor files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper

SHOWN = 12  # digits of a digest in messages
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Attached(Generic[T]):
    """Of one field of points: ``named``, e.g. ``lens``; ``what``, e.g. ``a tuned lens``, for messages."""

    named: str
    what: str
    held: WeakKeyDictionary[Stepper, dict[str, T]] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        _FIELDS.append(self)

    def put(self, stepper: Stepper, digest: str, thing: T) -> str:
        """Hold ``thing`` under ``digest``, which is returned."""
        self.held.setdefault(stepper, {})[digest] = thing
        return digest

    def get(self, stepper: Stepper, digest: str) -> T:
        """What is held of that name.

        Raises:
            BadArgument: nothing is.
        """
        held = self.held.get(stepper, {})
        if digest not in held:
            known = ", ".join(name[:SHOWN] for name in held) or "none is"
            expected = f"{self.what} attached to this model ({known})"
            raise BadArgument(f"point.{self.named}", brief(digest), expected, "attach it first")
        return held[digest]

    def lend(self, own: Stepper, copy: Stepper) -> None:
        """Hold for ``copy`` copies of all that is held for ``own``: what is written into those reaches no original."""
        held = self.held.setdefault(copy, {})
        for digest, thing in self.held.get(own, {}).items():
            if digest not in held:
                held[digest] = deepcopy(thing)


_FIELDS: list[Attached[Any]] = []


def lend_attached(own: Stepper, copy: Stepper) -> None:
    """Attach to ``copy``, which walks a copy of the model of ``own``, copies of all that is attached to ``own``."""
    for each in _FIELDS:
        each.lend(own, copy)


def attached_to(stepper: Stepper) -> dict[str, dict[str, Any]]:
    """Field of points → digest → what is held of that name: all that is attached, to be taken to another process."""
    return {each.named: dict(each.held.get(stepper, {})) for each in _FIELDS}


def attach_all(stepper: Stepper, things: Mapping[str, Mapping[str, Any]]) -> None:
    """What ``attached_to`` gave of the same model elsewhere."""
    for each in _FIELDS:
        for digest, thing in things[each.named].items():
            each.put(stepper, digest, thing)


def require_same_model(
    name: str, mine: Sequence[object], asked: Sequence[object], remedy: str = "fit it for this model"
) -> None:
    """Refuse what was fitted on another model: (fingerprint, dtype, layers, width), ``mine`` and ``asked``.

    Raises:
        BadArgument: one of them is another, by name.
    """
    for part, own, wanted in zip(("fingerprint", "dtype", "layers", "width"), mine, asked, strict=True):
        if own != wanted:
            raise BadArgument(f"{name}.{part}", brief(own), f"{brief(wanted)} of this model", remedy)


def dtype_of(stepper: Stepper) -> str:
    """Of the weights, as files and lenses say it: ``float32``."""
    return str(stepper.dtype).removeprefix("torch.")


def raised_dtype(stepper: Stepper) -> torch.dtype:
    """In which fitted maps of its states are computed: float32 at least."""
    return torch.float64 if stepper.dtype == torch.float64 else torch.float32


def brief(value: object) -> object:
    """A digest cut short; anything else as it is."""
    return value[:SHOWN] if isinstance(value, str) else value
