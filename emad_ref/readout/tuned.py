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
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.record import READOUTS, Ints, Work
from emad_ref.signals import raised

FULL = READOUTS.index("full")
SHOWN = 12  # digits of a digest in messages


@dataclass(frozen=True, eq=False)
class Translator:
    """T(h) = h + A·h + b. ``factors``: (A [D, D],), or (U [D, r], V [D, r]) of A = U·Vᵀ; ``bias`` b [D]."""

    factors: tuple[Tensor, ...]
    bias: Tensor

    def __post_init__(self) -> None:
        width, shapes = len(self.bias), [tuple(factor.shape) for factor in self.factors]
        full, low = shapes == [(width, width)], len(shapes) == 2 and shapes[0] == shapes[1] == (width, self.rank)
        if not full and not (low and self.rank):
            expected = f"one of [{width}, {width}], or two of [{width}, r ≥ 1]"
            raise BadArgument("translator.factors", shapes, expected, "as wide as the bias")

    @property
    def rank(self) -> int | None:
        """r, or None of a full matrix."""
        return None if len(self.factors) == 1 else self.factors[0].shape[1]

    @property
    def macs(self) -> int:
        """Multiply-adds per row: D², or 2·D·r."""
        return sum(factor.numel() for factor in self.factors)

    def __call__(self, hidden: Tensor) -> Tensor:
        """T of states [..., D], in their dtype; computed in float32 at least. Zeros give the states, bit for bit."""
        x = raised(hidden)
        first, *others = reversed(self.factors)
        moved = x @ (first if others else first.T)
        for factor in others:
            moved = moved @ factor.T
        return (x + (moved + self.bias)).to(hidden.dtype)


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

    def __post_init__(self) -> None:
        known = list(self.translators)
        if not known or known != sorted(known) or not all(1 <= layer < self.layers for layer in known):
            expected = f"some layers in 1–{self.layers - 1}, ascending"
            raise BadArgument("lens.translators", known, expected, "the last layer is what a lens is fitted to")
        kinds = {(len(each.bias), each.rank, each.bias.dtype) for each in self.translators.values()}
        if len(kinds) > 1:
            raise BadArgument("lens.translators", sorted(map(str, kinds)), "one width, rank and dtype in all layers")

    @property
    def width(self) -> int:
        """D, of the states it reads."""
        return len(self._any.bias)

    @property
    def rank(self) -> int | None:
        """r of every translator, or None of full ones."""
        return self._any.rank

    @cached_property
    def digest(self) -> str:
        """sha256 of the model it belongs to and of every number in it: its name in points."""
        said = sha256(f"{self.fingerprint} {self.dtype} {self.layers}".encode())
        for layer, translator in self.translators.items():
            for tensor in (*translator.factors, translator.bias):
                said.update(f" {layer} {tuple(tensor.shape)} {tensor.dtype} ".encode())
                said.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return said.hexdigest()

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
        remedy = "fit one for this model: emad lens"
        mine = (self.fingerprint, self.dtype, self.layers, self.width)
        for name, own, asked in zip(
            ("fingerprint", "dtype", "layers", "width"), mine, (fingerprint, dtype, layers, width), strict=True
        ):
            if own != asked:
                raise BadArgument(f"lens.{name}", _brief(own), f"{_brief(asked)} of this model", remedy)

    def placed(self, device: torch.device, dtype: torch.dtype) -> TunedLens:
        """A copy there; not a lens of another name: ``digest`` is asked of the one that was fitted."""
        moved = {
            layer: Translator(tuple(factor.to(device, dtype) for factor in each.factors), each.bias.to(device, dtype))
            for layer, each in self.translators.items()
        }
        return replace(self, translators=moved)

    @property
    def _any(self) -> Translator:
        return next(iter(self.translators.values()))


_ATTACHED: WeakKeyDictionary[Stepper, dict[str, TunedLens]] = WeakKeyDictionary()


def attach_lens(stepper: Stepper, lens: TunedLens, fingerprint: str) -> str:
    """Let points with this lens be read on ``stepper``, as long as it lives; returns what such points name it by.

    ``fingerprint``: of the model that ``stepper`` walks (``Loaded.fingerprint``).

    Raises:
        BadArgument: a lens of another model, dtype, number of layers or width.
    """
    dtype = str(stepper.dtype).removeprefix("torch.")
    lens.require(fingerprint, dtype, stepper.layers, stepper.geometry.hidden)
    raised_dtype = torch.float64 if stepper.dtype == torch.float64 else torch.float32
    _ATTACHED.setdefault(stepper, {})[lens.digest] = lens.placed(stepper.device, raised_dtype)
    return lens.digest


def lend_lenses(own: Stepper, copy: Stepper) -> None:
    """Attach to ``copy``, which walks a copy of the model that ``own`` walks, copies of all lenses attached to ``own``.

    Nothing that is written into those reaches what ``own`` reads through.
    """
    held = _ATTACHED.setdefault(copy, {})
    for name, lens in _ATTACHED.get(own, {}).items():
        if name not in held:
            held[name] = deepcopy(lens)


def lens_named(stepper: Stepper, digest: str | None) -> TunedLens | None:
    """The attached lens of that name; None for None, the model's own head.

    Raises:
        BadArgument: none of that name is attached.
    """
    if digest is None:
        return None
    attached = _ATTACHED.get(stepper, {})
    if digest not in attached:
        known = ", ".join(name[:SHOWN] for name in attached) or "none is"
        raise BadArgument(
            "point.lens", _brief(digest), f"a tuned lens that is attached to this model ({known})", "attach it first"
        )
    return attached[digest]


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


def _brief(value: object) -> object:
    return value[:SHOWN] if isinstance(value, str) else value
