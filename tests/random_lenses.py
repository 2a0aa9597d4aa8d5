"""Tuned lenses with random or chosen numbers, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from emad_ref.models.stepper import Stepper
from emad_ref.probes.tuned_lens import Translator, TunedLens, attach_lens

FINGERPRINT = "f00d"


def drawn_lens(
    stepper: Stepper, layers: Sequence[int], rank: int | None = None, *, seed: int = 0, scale: float = 0.5
) -> TunedLens:
    """Return a lens whose A·h and b are about ``scale`` of h; scale 0: the identity."""
    generator, width = torch.Generator().manual_seed(seed), stepper.geometry.hidden
    dtype = torch.float64 if stepper.dtype == torch.float64 else torch.float32

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def translator() -> Translator:
        if rank is None:
            factors: tuple[torch.Tensor, ...] = (scale * drawn(width, width) / width**0.5,)
        else:
            factors = (scale * drawn(width, rank) / rank**0.5, drawn(width, rank) / width**0.5)
        return Translator(factors, scale * drawn(width))

    translators = {layer: translator() for layer in layers}
    return TunedLens(FINGERPRINT, str(stepper.dtype).removeprefix("torch."), stepper.layers, translators)


def attached(stepper: Stepper, layers: Sequence[int], rank: int | None = None, **options: float) -> str:
    """Attach a ``drawn_lens`` to ``stepper`` and return its digest."""
    return attach_lens(stepper, drawn_lens(stepper, layers, rank, **options), FINGERPRINT)
