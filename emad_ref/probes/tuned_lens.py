"""Tuned lenses and state translators: affine maps of hidden states, attached to the stepper of their model.

    z_ℓ = head(norm(T_ℓ(h_ℓ)))     T_ℓ(h) = h + A_ℓ·h + b_ℓ       lens, Belrose et al., 2303.08112
    ĥ_ℓ = h_e + U·(Vᵀ·h_e) + b     1 ≤ e < ℓ < L                  state translator of the pair (e, ℓ)

A is D × D, or U·Vᵀ of rank r. The state translator estimates the state above an exit, for the K and V that later
tokens attend to. Operating points name both by digest; the tensors are held once per stepper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument, require_instance
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.record import Ints, Work
from emad_ref.signals import upcast_to_float32

DIGEST_DIGITS = 12  # shown digits of a digest in messages
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class AttachedTensors(Generic[T]):
    """Tensors by digest for one field of points: ``named``, e.g. ``lens``; ``what``, ``a tuned lens`` in messages."""

    named: str
    what: str
    by_stepper: WeakKeyDictionary[Stepper, dict[str, T]] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        _FIELDS.append(self)

    def put(self, stepper: Stepper, digest: str, thing: T) -> str:
        """Store ``thing`` under ``digest``; returns the digest."""
        self.by_stepper.setdefault(stepper, {})[digest] = thing
        return digest

    def get(self, stepper: Stepper, digest: str) -> T:
        """The tensors of that digest. Raises BadArgument if none are attached."""
        attached = self.by_stepper.get(stepper, {})
        if digest not in attached:
            names = ", ".join(name[:DIGEST_DIGITS] for name in attached) or "none is"
            expected = f"{self.what} attached to this model ({names})"
            raise BadArgument(f"point.{self.named}", shorten_digest(digest), expected, "attach it first")
        return attached[digest]

    def attach_copies_to(self, own: Stepper, copy: Stepper) -> None:
        """Attach copies of all tensors of ``own`` to ``copy``, so that writing into them changes no original."""
        attached = self.by_stepper.setdefault(copy, {})
        for digest, thing in self.by_stepper.get(own, {}).items():
            if digest not in attached:
                attached[digest] = deepcopy(thing)


_FIELDS: list[AttachedTensors[Any]] = []


def copy_attachments(own: Stepper, copy: Stepper) -> None:
    """Attach copies of everything attached to ``own`` to ``copy``, the stepper of a copy of its model."""
    for each in _FIELDS:
        each.attach_copies_to(own, copy)


def collect_attachments(stepper: Stepper) -> dict[str, dict[str, Any]]:
    """Field of points → digest → tensors: all attachments, to be sent to another process."""
    return {each.named: dict(each.by_stepper.get(stepper, {})) for each in _FIELDS}


def attach_collected_tensors(stepper: Stepper, things: Mapping[str, Mapping[str, Any]]) -> None:
    """Attach the ``collect_attachments`` of the same model in another process."""
    for each in _FIELDS:
        for digest, thing in things[each.named].items():
            each.put(stepper, digest, thing)


def require_same_model(
    name: str, mine: Sequence[object], theirs: Sequence[object], remedy: str = "fit it for this model"
) -> None:
    """Raise BadArgument, by name, if (fingerprint, dtype, layers, width) of ``mine`` and ``theirs`` differ."""
    for part, own, expected in zip(("fingerprint", "dtype", "layers", "width"), mine, theirs, strict=True):
        if own != expected:
            raise BadArgument(
                f"{name}.{part}", shorten_digest(own), f"{shorten_digest(expected)} of this model", remedy
            )


def weight_dtype_name(stepper: Stepper) -> str:
    """Name of the weights' dtype, e.g. ``float32``."""
    return str(stepper.dtype).removeprefix("torch.")


def at_least_float32_dtype(stepper: Stepper) -> torch.dtype:
    """The dtype of maps of its states: float32, or float64 for float64 models."""
    return torch.float64 if stepper.dtype == torch.float64 else torch.float32


def shorten_digest(value: object) -> object:
    """The head of a digest; any other value unchanged."""
    return value[:DIGEST_DIGITS] if isinstance(value, str) else value


@dataclass(frozen=True, eq=False)
class Translator:
    """T(h) = h + A·h + b. ``factors``: (A [D, D],), (U [D, r], V [D, r]) of A = U·Vᵀ, or () of A = 0; ``bias`` [D]."""

    factors: tuple[Tensor, ...]
    bias: Tensor

    def __post_init__(self) -> None:
        if self.bias.ndim != 1:
            raise BadArgument(
                "translator.bias", tuple(self.bias.shape), "a bias [D]", "one number per entry of a state"
            )
        width, shapes = len(self.bias), [tuple(factor.shape) for factor in self.factors]
        full, low = shapes == [(width, width)], len(shapes) == 2 and shapes[0] == shapes[1] == (width, self.rank)
        if shapes and not full and not (low and self.rank):
            expected = f"none, one of [{width}, {width}], or two of [{width}, r ≥ 1]"
            raise BadArgument("translator.factors", shapes, expected, "as wide as the bias")

    @property
    def rank(self) -> int | None:
        """r, 0 without factors, or None for a full matrix."""
        if not self.factors:
            return 0
        return None if len(self.factors) == 1 else self.factors[0].shape[1]

    @property
    def macs_per_row(self) -> int:
        """Multiply-adds per row: D², or 2·D·r; 0 for a bias alone."""
        return sum(factor.numel() for factor in self.factors)

    def copy_to_device(self, device: torch.device, dtype: torch.dtype) -> Translator:
        """A copy on ``device`` in ``dtype``."""
        return Translator(tuple(factor.to(device, dtype) for factor in self.factors), self.bias.to(device, dtype))

    def __call__(self, hidden: Tensor) -> Tensor:
        """T of states [..., D], in their dtype; computed in float32 at least. Zeros give the states, bit for bit."""
        x = upcast_to_float32(hidden)
        if not self.factors:
            return (x + self.bias).to(hidden.dtype)
        first, *others = reversed(self.factors)
        moved = x @ (first if others else first.T)
        for factor in others:
            moved = moved @ factor.T
        return (x + (moved + self.bias)).to(hidden.dtype)


class TranslatorProperties(NamedTuple):
    """Properties common to translators that are used together: ``width`` D of the states, ``rank``, ``dtype``."""

    width: int
    rank: int | None
    dtype: torch.dtype


def common_translator_properties(name: str, translators: Mapping[Any, Translator], each: str) -> TranslatorProperties:
    """The common kind of at least one translator.

    Raises:
        BadArgument: several widths, ranks or dtypes; ``name`` and ``each`` of its keys are for the message.
    """
    kinds = {TranslatorProperties(len(one.bias), one.rank, one.bias.dtype) for one in translators.values()}
    if len(kinds) > 1:
        kinds_text = sorted(str(tuple(kind)) for kind in kinds)
        raise BadArgument(name, kinds_text, f"one width, rank and dtype in all {each}")
    return kinds.pop()


def translator_digest(model: str, translators: Mapping[Any, Translator]) -> str:
    """sha256 of ``model`` and of every number of ``translators``, each beside its key."""
    digest = sha256(model.encode())
    for key, translator in translators.items():
        for tensor in (*translator.factors, translator.bias):
            digest.update(f" {key} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


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
    kind: TranslatorProperties = field(init=False)

    def __post_init__(self) -> None:
        layers = list(self.translators)
        if not layers or layers != sorted(layers) or not all(1 <= layer < self.layers for layer in layers):
            expected = f"some layers in 1–{self.layers - 1}, ascending"
            raise BadArgument("lens.translators", layers, expected, "the last layer is what a lens is fitted to")
        object.__setattr__(self, "kind", common_translator_properties("lens.translators", self.translators, "layers"))
        if self.rank == 0:
            raise BadArgument("lens.translators", "biases alone", "full matrices, or a rank ≥ 1")

    @property
    def width(self) -> int:
        """D, of the states it reads."""
        return self.kind.width

    @property
    def rank(self) -> int | None:
        """r of every translator, or None for full ones."""
        return self.kind.rank

    @cached_property
    def digest(self) -> str:
        """sha256 of its model and its numbers, its name in points."""
        return translator_digest(f"{self.fingerprint} {self.dtype} {self.layers}", self.translators)

    def macs_per_row(self, layer: int) -> int:
        """Multiply-adds per row in front of a head after ``layer``."""
        return self.translators[layer].macs_per_row if layer in self.translators else 0

    def __call__(self, hidden: Tensor, layer: int) -> Tensor:
        """Head input for states [..., D] after ``layer``."""
        return self.translators[layer](hidden) if layer in self.translators else hidden

    def apply_and_count_work(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        """``self(hidden, layer)``; counts its multiply-adds in ``work`` with the rows of the head that runs next."""
        work.count_readout("full", layer, 0, hidden.shape[:-1].numel() * self.macs_per_row(layer))
        return self(hidden, layer)

    def require_fits_model(self, fingerprint: str, dtype: str, layers: int, width: int) -> None:
        """Raise BadArgument for another fingerprint, dtype, number of layers or width than the fitted ones."""
        mine = (self.fingerprint, self.dtype, self.layers, self.width)
        require_same_model("lens", mine, (fingerprint, dtype, layers, width), "fit one for this model: emad lens")

    def copy_to_device(self, device: torch.device, dtype: torch.dtype) -> TunedLens:
        """A copy on ``device`` in ``dtype``, for computing only: points name the digest of the fitted lens."""
        moved = {layer: each.copy_to_device(device, dtype) for layer, each in self.translators.items()}
        return replace(self, translators=moved)


_LENSES: AttachedTensors[TunedLens] = AttachedTensors("lens", "a tuned lens that is")


def attach_lens(stepper: Stepper, lens: TunedLens, fingerprint: str) -> str:
    """Attach a tuned lens to a stepper, so that operating points can name it.

    Parameters
    ----------
    stepper : Stepper
        The model that decodes.
    lens : TunedLens
        A lens fitted on that model.
    fingerprint : str
        ``LoadedModel.fingerprint`` of the stepper's model.

    Returns
    -------
    str
        The digest by which points name the lens.

    Raises
    ------
    BadArgument
        A lens of another model, dtype, number of layers or width.

    References
    ----------
    Belrose et al., "Eliciting Latent Predictions from Transformers with the Tuned Lens", 2303.08112.
    """
    require_instance("lens", lens, TunedLens, "load_lens(path).lens is one")
    lens.require_fits_model(fingerprint, weight_dtype_name(stepper), stepper.layers, stepper.geometry.hidden)
    return _LENSES.put(stepper, lens.digest, lens.copy_to_device(stepper.device, at_least_float32_dtype(stepper)))


def get_attached_lens(stepper: Stepper, digest: str | None) -> TunedLens | None:
    """The attached lens of ``digest``; None for None, the model's own head. Raises BadArgument if none is attached."""
    return None if digest is None else _LENSES.get(stepper, digest)


def get_point_lens(stepper: Stepper, point: OperatingPoint) -> TunedLens | None:
    """The lens of ``point``. Raises BadArgument if it is not attached, or lacks one of the probes."""
    lens = get_attached_lens(stepper, point.lens)
    if lens is not None:
        missing = [probe for probe in point.probes if probe not in lens.translators]
        if missing:
            has = ", ".join(map(str, lens.translators))
            raise BadArgument(
                "point.probes", missing, f"layers that its lens translates ({has})", "fit it at these too"
            )
    return lens


def lens_macs_by_layer(lens: TunedLens | None, layers: int) -> Ints:
    """int64 [L] multiply-adds per row in front of a head after each layer; 0 without a lens."""
    macs: Ints = np.zeros(layers, dtype=np.int64)
    if lens is not None:
        for layer in lens.translators:
            macs[layer - 1] = lens.macs_per_row(layer)
    return macs


Pair = tuple[int, int]  # (exit, layer): from the state after the exit to the state after the layer


@dataclass(frozen=True, eq=False)
class StateTranslators:
    """Translators by pair, all of one kind, for the model with this ``fingerprint`` and ``dtype``, of L ``layers``.

    ``pairs``: ascending; an exit e with one has all of (e, e + 1) … (e, L − 1). Other exits are copied.

    Raises:
        BadArgument: no pairs, incomplete ones, or several widths, ranks or dtypes.
    """

    fingerprint: str
    dtype: str
    layers: int
    pairs: Mapping[Pair, Translator]
    kind: TranslatorProperties = field(init=False)

    def __post_init__(self) -> None:
        pairs = list(self.pairs)
        if not pairs or pairs[0][0] < 1 or pairs != list_exit_layer_pairs(self.exit_layers, self.layers):
            expected = f"of each exit e in 1–{self.layers - 2} all pairs (e, e + 1) … (e, {self.layers - 1}), ascending"
            raise BadArgument("translators.pairs", pairs, expected)
        object.__setattr__(self, "kind", common_translator_properties("translators.pairs", self.pairs, "pairs"))

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """Exit layers with translators, ascending."""
        return tuple(sorted({at for at, _ in self.pairs}))

    @property
    def width(self) -> int:
        """D, of the states."""
        return self.kind.width

    @property
    def rank(self) -> int | None:
        """r of every translator, 0 for biases alone, or None for full ones."""
        return self.kind.rank

    @cached_property
    def digest(self) -> str:
        """sha256 of their model and their numbers, their name in points."""
        return translator_digest(f"states {self.fingerprint} {self.dtype} {self.layers}", self.pairs)

    def macs_per_row(self, exit_: int, layer: int) -> int:
        """Multiply-adds per row of the state after ``layer`` of a token that exited after ``exit_``."""
        return self.pairs[exit_, layer].macs_per_row if (exit_, layer) in self.pairs else 0

    def macs_per_row_by_exit(self, layer: int) -> Ints:
        """int64 [L] multiply-adds per row in front of a K/V-only pass of ``layer``, by exit (column e − 1)."""
        return np.array([self.macs_per_row(exit_, layer - 1) for exit_ in range(1, self.layers + 1)], dtype=np.int64)

    def estimate_layer_input_states(self, states: Tensor, exits: Ints, layer: int, work: Work) -> Tensor:
        """Estimated states [rows, n, D] below ``layer`` of tokens that exited earlier; counted in ``work``.

        ``states``: those after ``exits`` int64 [rows], all below ``layer``.
        """
        moved = states
        for exit_ in np.unique(exits).tolist():
            translator = self.pairs.get((exit_, layer - 1))
            if translator is None:
                continue
            chosen = np.flatnonzero(exits == exit_)
            work.fill_macs[layer - 1] += len(chosen) * states.shape[1] * translator.macs_per_row
            if len(chosen) == len(states):
                return translator(states)
            if moved is states:
                moved = states.clone()
            index = torch.from_numpy(chosen).to(states.device)
            moved[index] = translator(states[index])
        return moved

    def copy_to_device(self, device: torch.device, dtype: torch.dtype) -> StateTranslators:
        """A copy on ``device`` in ``dtype``, for computing only: points name the digest of the fitted ones."""
        return replace(self, pairs={pair: each.copy_to_device(device, dtype) for pair, each in self.pairs.items()})


def list_exit_layer_pairs(exits: tuple[int, ...], layers: int) -> list[Pair]:
    """All pairs of these exits, ascending; an exit right below the last layer has none."""
    return [(exit_, layer) for exit_ in exits for layer in range(exit_ + 1, layers)]


_TRANSLATORS: AttachedTensors[StateTranslators] = AttachedTensors("translators", "state translators")


def attach_translators(stepper: Stepper, translators: StateTranslators, fingerprint: str) -> str:
    """Attach state translators to a stepper, so that operating points can name them.

    Parameters
    ----------
    stepper : Stepper
        The model that decodes.
    translators : StateTranslators
        Translators fitted on that model.
    fingerprint : str
        ``LoadedModel.fingerprint`` of the stepper's model.

    Returns
    -------
    str
        The digest by which points name the translators.

    Raises
    ------
    BadArgument
        Translators of another model, dtype, number of layers or width.
    """
    mine = (translators.fingerprint, translators.dtype, translators.layers, translators.width)
    require_same_model(
        "translators", mine, (fingerprint, weight_dtype_name(stepper), stepper.layers, stepper.geometry.hidden)
    )
    placed = translators.copy_to_device(stepper.device, at_least_float32_dtype(stepper))
    return _TRANSLATORS.put(stepper, translators.digest, placed)


def get_point_translators(stepper: Stepper, point: OperatingPoint) -> StateTranslators | None:
    """The attached translators that ``point`` names, or None. Raises BadArgument if they lack one of its exits."""
    if point.translators is None:
        return None
    translators = _TRANSLATORS.get(stepper, point.translators)
    missing = [probe for probe in point.probes if probe < point.ceiling - 1 and probe not in translators.exit_layers]
    if missing:
        has = ", ".join(map(str, translators.exit_layers))
        raise BadArgument("point.probes", missing, f"exits that its translators know ({has})", "fit them at these too")
    return translators
