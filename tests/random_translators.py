"""State translators with random or chosen numbers, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from emad_ref.models.stepper import Stepper
from emad_ref.probes.tuned_lens import (
    StateTranslators,
    Translator,
    at_least_float32_dtype,
    attach_translators,
    list_exit_layer_pairs,
    weight_dtype_name,
)

FINGERPRINT = "f00d"


def drawn_translators(
    stepper: Stepper, exits: Sequence[int], rank: int | None = 4, *, seed: int = 0, scale: float = 0.5
) -> StateTranslators:
    """Return translators whose A·h and b are about ``scale`` of h; scale 0: copying."""
    generator = torch.Generator().manual_seed(seed)
    width = stepper.geometry.hidden
    dtype = at_least_float32_dtype(stepper)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def translator() -> Translator:
        factors: tuple[torch.Tensor, ...] = ()
        if rank is None:
            factors = (scale * drawn(width, width) / width**0.5,)
        elif rank:
            factors = (scale * drawn(width, rank) / rank**0.5, drawn(width, rank) / width**0.5)
        return Translator(factors, scale * drawn(width))

    pairs = {pair: translator() for pair in list_exit_layer_pairs(tuple(exits), stepper.layers)}
    return StateTranslators(FINGERPRINT, weight_dtype_name(stepper), stepper.layers, pairs)


def attached_translators(stepper: Stepper, exits: Sequence[int], rank: int | None = 4, **options: float) -> str:
    """Attach ``drawn_translators`` to ``stepper`` and return their digest."""
    return attach_translators(stepper, drawn_translators(stepper, exits, rank, **options), FINGERPRINT)  # type: ignore[arg-type]
