"""State translators: the state after a layer above an exit, estimated from the state that a token left with.

    ĥ_ℓ = h_e + U·(Vᵀ·h_e) + b,   1 ≤ e < ℓ < L,   U, V [D, r] of the pair (e, ℓ)

What would have been computed up there is needed for one thing, K and V that later tokens attend to: state copying takes
h_e for it (CALM), this takes ĥ_ℓ. Rank 0 is b alone, and with b = 0 it is copying. Each pair is fitted on its own
(``calibration.translating``): a chain of steps ℓ → ℓ + 1 costs as much and passes its errors on. The layer right above
the exit reads h_e itself, so no pair is owed for it.

A point names its translators by ``digest``, as it names a lens; the tensors are attached to the stepper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.readout.attached import Attached, dtype_of, raised_dtype, require_same_model
from emad_ref.readout.tuned import Kind, Translator, digest_of, kind_of
from emad_ref.record import Ints, Work

Pair = tuple[int, int]  # (exit, layer): from the state after the one to the state after the other


@dataclass(frozen=True, eq=False)
class StateTranslators:
    """Translators by pair, all of one kind, for the model with this ``fingerprint`` and ``dtype``, of L ``layers``.

    ``pairs``: ascending; an exit e that has one has all of (e, e + 1) … (e, L − 1). Exits without are copied.

    Raises:
        BadArgument: no pairs, others than those, of several widths, ranks or dtypes.
    """

    fingerprint: str
    dtype: str
    layers: int
    pairs: Mapping[Pair, Translator]
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        known = list(self.pairs)
        if not known or known[0][0] < 1 or known != pairs_above(self.exits, self.layers):
            expected = f"of each exit e in 1–{self.layers - 2} all pairs (e, e + 1) … (e, {self.layers - 1}), ascending"
            raise BadArgument("translators.pairs", known, expected)
        object.__setattr__(self, "kind", kind_of("translators.pairs", self.pairs, "pairs"))

    @property
    def exits(self) -> tuple[int, ...]:
        """Layers that tokens may leave after, ascending."""
        return tuple(sorted({at for at, _ in self.pairs}))

    @property
    def width(self) -> int:
        """D, of the states."""
        return self.kind.width

    @property
    def rank(self) -> int | None:
        """r of every translator, 0 of biases alone, or None of full ones."""
        return self.kind.rank

    @cached_property
    def digest(self) -> str:
        """sha256 of the model they belong to and of every number in them: their name in points."""
        return digest_of(f"states {self.fingerprint} {self.dtype} {self.layers}", self.pairs)

    def macs(self, exit_: int, layer: int) -> int:
        """Multiply-adds per row of the state after ``layer`` of a token that left after ``exit_``."""
        return self.pairs[exit_, layer].macs if (exit_, layer) in self.pairs else 0

    def macs_below(self, layer: int) -> Ints:
        """int64 [L] multiply-adds per row that a K/V-only pass of ``layer`` asks for, by the exit (column e − 1)."""
        return np.array([self.macs(exit_, layer - 1) for exit_ in range(1, self.layers + 1)], dtype=np.int64)

    def below(self, states: Tensor, exits: Ints, layer: int, work: Work) -> Tensor:
        """What stands in for the states below ``layer``, [rows, n, D], of tokens that left with ``states`` after
        ``exits`` int64 [rows], all below ``layer``; charged to ``work``.
        """
        moved = states
        for exit_ in np.unique(exits).tolist():
            translator = self.pairs.get((exit_, layer - 1))
            if translator is None:
                continue
            chosen = np.flatnonzero(exits == exit_)
            work.fill_macs[layer - 1] += len(chosen) * states.shape[1] * translator.macs
            if len(chosen) == len(states):
                return translator(states)
            if moved is states:
                moved = states.clone()
            index = torch.from_numpy(chosen).to(states.device)
            moved[index] = translator(states[index])
        return moved

    def placed(self, device: torch.device, dtype: torch.dtype) -> StateTranslators:
        """A copy there; not of another name: ``digest`` is asked of those that were fitted."""
        return replace(self, pairs={pair: each.placed(device, dtype) for pair, each in self.pairs.items()})


def pairs_above(exits: tuple[int, ...], layers: int) -> list[Pair]:
    """All pairs of these exits, ascending: of one right below the last layer there is none."""
    return [(exit_, layer) for exit_ in exits for layer in range(exit_ + 1, layers)]


_TRANSLATORS: Attached[StateTranslators] = Attached("translators", "state translators")


def attach_translators(stepper: Stepper, translators: StateTranslators, fingerprint: str) -> str:
    """Let points with these translators be decoded on ``stepper``, as long as it lives; returns what they name them by.

    ``fingerprint``: of the model that ``stepper`` walks (``Loaded.fingerprint``).

    Raises:
        BadArgument: translators of another model, dtype, number of layers or width.
    """
    mine = (translators.fingerprint, translators.dtype, translators.layers, translators.width)
    require_same_model("translators", mine, (fingerprint, dtype_of(stepper), stepper.layers, stepper.geometry.hidden))
    placed = translators.placed(stepper.device, raised_dtype(stepper))
    return _TRANSLATORS.put(stepper, translators.digest, placed)


def translators_of(stepper: Stepper, point: OperatingPoint) -> StateTranslators | None:
    """The attached translators that ``point`` names; None where it names none.

    Raises:
        BadArgument: none of that name are attached; a probe that they do not know as an exit.
    """
    if point.translators is None:
        return None
    found = _TRANSLATORS.get(stepper, point.translators)
    missing = [probe for probe in point.probes if probe < point.ceiling - 1 and probe not in found.exits]
    if missing:
        has = ", ".join(map(str, found.exits))
        raise BadArgument("point.probes", missing, f"exits that its translators know ({has})", "fit them at these too")
    return found
