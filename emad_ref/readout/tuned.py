"""The tuned lens: a readout after layer ℓ, fitted to what the model says at its end (Belrose et al., 2303.08112).

    z_ℓ = head(norm(T_ℓ(h_ℓ)))     T_ℓ(h) = h + A_ℓ·h + b_ℓ

A_ℓ is D × D, or U_ℓ·V_ℓᵀ of rank r: D² or 2·D·r multiply-adds a row in front of the head. Layers without a translator,
the last one always, are read by the model's own head: there T is the identity.

A point names its lens by ``digest``, so that points stay small values; the tensors are *attached* to the stepper that
walks the model, once, and whatever reads that model by that point finds them there. Knows no text and no fit
(``calibration.tuning``), and no file (``calibration.lens_file``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.readout.attached import Attached, dtype_of, raised_dtype, require_same_model
from emad_ref.record import READOUTS, Ints, Work
from emad_ref.signals import raised

FULL = READOUTS.index("full")


@dataclass(frozen=True, eq=False)
class Translator:
    """T(h) = h + A·h + b. ``factors``: (A [D, D],), (U [D, r], V [D, r]) of A = U·Vᵀ, or () of A = 0; ``bias`` [D]."""

    factors: tuple[Tensor, ...]
    bias: Tensor

    def __post_init__(self) -> None:
        width, shapes = len(self.bias), [tuple(factor.shape) for factor in self.factors]
        full, low = shapes == [(width, width)], len(shapes) == 2 and shapes[0] == shapes[1] == (width, self.rank)
        if shapes and not full and not (low and self.rank):
            expected = f"none, one of [{width}, {width}], or two of [{width}, r ≥ 1]"
            raise BadArgument("translator.factors", shapes, expected, "as wide as the bias")

    @property
    def rank(self) -> int | None:
        """r, 0 without factors, or None of a full matrix."""
        if not self.factors:
            return 0
        return None if len(self.factors) == 1 else self.factors[0].shape[1]

    @property
    def macs(self) -> int:
        """Multiply-adds per row: D², or 2·D·r; 0 of a bias alone."""
        return sum(factor.numel() for factor in self.factors)

    def placed(self, device: torch.device, dtype: torch.dtype) -> Translator:
        """A copy there."""
        return Translator(tuple(factor.to(device, dtype) for factor in self.factors), self.bias.to(device, dtype))

    def __call__(self, hidden: Tensor) -> Tensor:
        """T of states [..., D], in their dtype; computed in float32 at least. Zeros give the states, bit for bit."""
        x = raised(hidden)
        if not self.factors:
            return (x + self.bias).to(hidden.dtype)
        first, *others = reversed(self.factors)
        moved = x @ (first if others else first.T)
        for factor in others:
            moved = moved @ factor.T
        return (x + (moved + self.bias)).to(hidden.dtype)


class Kind(NamedTuple):
    """What translators that are used together share: ``width`` D of the states, ``rank`` as of each, ``dtype``."""

    width: int
    rank: int | None
    dtype: torch.dtype


def kind_of(name: str, translators: Mapping[Any, Translator], each: str) -> Kind:
    """The one kind of these, of which there is one at least.

    Raises:
        BadArgument: several widths, ranks or dtypes; ``name`` is what holds them, one for ``each`` of its keys.
    """
    kinds = {Kind(len(one.bias), one.rank, one.bias.dtype) for one in translators.values()}
    if len(kinds) > 1:
        found = sorted(str(tuple(kind)) for kind in kinds)
        raise BadArgument(name, found, f"one width, rank and dtype in all {each}")
    return kinds.pop()


def digest_of(model: str, translators: Mapping[Any, Translator]) -> str:
    """sha256 of ``model`` and of every number of ``translators``, each beside its key."""
    said = sha256(model.encode())
    for key, translator in translators.items():
        for tensor in (*translator.factors, translator.bias):
            said.update(f" {key} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            said.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return said.hexdigest()


@dataclass(frozen=True, eq=False)
class TunedLens:
    """Translators by layer, all of one kind, for the model with this ``fingerprint`` and ``dtype``, of L ``layers``.

    Raises:
        BadArgument: no translators, or of layers outside 1…L − 1, of several widths, ranks or dtypes.
    """

    fingerprint: str
    dtype: str
    layers: int
    translators: Mapping[int, Translator]
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        known = list(self.translators)
        if not known or known != sorted(known) or not all(1 <= layer < self.layers for layer in known):
            expected = f"some layers in 1–{self.layers - 1}, ascending"
            raise BadArgument("lens.translators", known, expected, "the last layer is what a lens is fitted to")
        object.__setattr__(self, "kind", kind_of("lens.translators", self.translators, "layers"))
        if self.rank == 0:
            raise BadArgument("lens.translators", "biases alone", "full matrices, or a rank ≥ 1")

    @property
    def width(self) -> int:
        """D, of the states it reads."""
        return self.kind.width

    @property
    def rank(self) -> int | None:
        """r of every translator, or None of full ones."""
        return self.kind.rank

    @cached_property
    def digest(self) -> str:
        """sha256 of the model it belongs to and of every number in it: its name in points."""
        return digest_of(f"{self.fingerprint} {self.dtype} {self.layers}", self.translators)

    def macs(self, layer: int) -> int:
        """Multiply-adds per row in front of a head after ``layer``."""
        return self.translators[layer].macs if layer in self.translators else 0

    def __call__(self, hidden: Tensor, layer: int) -> Tensor:
        """What the head reads of states [..., D] after ``layer``."""
        return self.translators[layer](hidden) if layer in self.translators else hidden

    def charged(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        """The same, for a head that runs next: its multiply-adds go into ``work``, beside that head's rows."""
        work.readout_macs[FULL, layer - 1] += hidden.shape[:-1].numel() * self.macs(layer)
        return self(hidden, layer)

    def require(self, fingerprint: str, dtype: str, layers: int, width: int) -> None:
        """Refuse another model than the one it was fitted on.

        Raises:
            BadArgument: another fingerprint, dtype, number of layers or width.
        """
        mine = (self.fingerprint, self.dtype, self.layers, self.width)
        require_same_model("lens", mine, (fingerprint, dtype, layers, width), "fit one for this model: emad lens")

    def placed(self, device: torch.device, dtype: torch.dtype) -> TunedLens:
        """A copy there; not a lens of another name: ``digest`` is asked of the one that was fitted."""
        moved = {layer: each.placed(device, dtype) for layer, each in self.translators.items()}
        return replace(self, translators=moved)


_LENSES: Attached[TunedLens] = Attached("lens", "a tuned lens that is")


def attach_lens(stepper: Stepper, lens: TunedLens, fingerprint: str) -> str:
    """Let points with this lens be read on ``stepper``, as long as it lives; returns what such points name it by.

    ``fingerprint``: of the model that ``stepper`` walks (``Loaded.fingerprint``).

    Raises:
        BadArgument: a lens of another model, dtype, number of layers or width.
    """
    lens.require(fingerprint, dtype_of(stepper), stepper.layers, stepper.geometry.hidden)
    return _LENSES.put(stepper, lens.digest, lens.placed(stepper.device, raised_dtype(stepper)))


def lens_named(stepper: Stepper, digest: str | None) -> TunedLens | None:
    """The attached lens of that name; None for None, the model's own head.

    Raises:
        BadArgument: none of that name is attached.
    """
    return None if digest is None else _LENSES.get(stepper, digest)


def lens_of(stepper: Stepper, point: OperatingPoint) -> TunedLens | None:
    """The lens that ``point`` reads by.

    Raises:
        BadArgument: as ``lens_named``; a probe that the lens has no translator for.
    """
    lens = lens_named(stepper, point.lens)
    if lens is not None:
        missing = [probe for probe in point.probes if probe not in lens.translators]
        if missing:
            has = ", ".join(map(str, lens.translators))
            raise BadArgument(
                "point.probes", missing, f"layers that its lens translates ({has})", "fit it at these too"
            )
    return lens


def macs_ahead(lens: TunedLens | None, layers: int) -> Ints:
    """int64 [L] multiply-adds per row in front of a head after each layer: nothing without a lens."""
    ahead: Ints = np.zeros(layers, dtype=np.int64)
    if lens is not None:
        for layer in lens.translators:
            ahead[layer - 1] = lens.macs(layer)
    return ahead
