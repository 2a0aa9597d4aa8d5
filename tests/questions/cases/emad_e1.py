"""Documents whose mean entropy per layer is known; their own level varies, as that of texts does."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_e1 import Found
from emad_ref.verdict.units import ByDocument
from tests.questions.simulation import Case


def profile(steps: list[float], documents: int = 60):
    """Entropy that changes by ``steps`` nats from layer to layer, between documents with a deviation of 0.05 nats."""

    def found(rng: np.random.Generator) -> Found:
        tokens = rng.integers(50, 200, documents)
        means = 3.0 + np.cumsum([0.0, *steps]) + 0.05 * rng.standard_normal((documents, len(steps) + 1))
        return Found(ByDocument(means * tokens[:, None]), ByDocument(tokens))

    return found


def names_the_rise(verdict) -> None:
    assert "layer 2 → 3" in verdict.reason


CASES = [
    Case("entropy falls at every layer", "holds", profile([-0.2, -0.1, -0.3]), draws=20),
    Case("entropy rises once", "fails", profile([-0.2, 0.1, -0.3]), draws=20, check=names_the_rise),
    Case("one step is flat, the others fall far", "edge", profile([-0.5, 0.0, -0.5]), draws=100),
]
