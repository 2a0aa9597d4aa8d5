"""Documents whose mean entropy per layer is known; their windows have levels of their own, alike within a document."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.emad_e1 import EntropyProfileEvidence
from emad_ref.statistics.units import ByDocument, DocumentOf
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case, celled, clustered

WINDOWS = 3  # of a document
SPREAD_NATS = 0.05  # of a layer, between windows


def profile(steps: list[float], documents: int = 60, icc: float = 0.3, spread: float = SPREAD_NATS):
    """Entropy that changes by ``steps`` nats from layer to layer."""

    def found(rng: np.random.Generator) -> EntropyProfileEvidence:
        tokens = rng.integers(50, 200, documents * WINDOWS)
        columns = [clustered(rng, documents, WINDOWS, icc) for _ in range(len(steps) + 1)]
        document = DocumentOf(columns[0][1])
        means = 3.0 + np.cumsum([0.0, *steps]) + spread * np.stack([column for column, _ in columns], axis=1)
        return EntropyProfileEvidence(
            ByDocument.summed(means * tokens[:, None], document), ByDocument.summed(tokens, document)
        )

    return found


def cell(steps: list[float]):
    return lambda n, icc: profile(steps, n, icc)


def names_the_rise(verdict: Verdict) -> None:
    assert "layer 2 → 3" in verdict.reason


CASES = [
    Case("entropy falls at every layer", "holds", profile([-0.2, -0.1, -0.3]), draws=20),
    Case("entropy rises once", "fails", profile([-0.2, 0.1, -0.3]), draws=20, check=names_the_rise),
    Case("every layer says the same", "tied", profile([0.0, 0.0], spread=0.0)),
    *celled("one step is flat, the others fall far", "edge", cell([-0.5, 0.0, -0.5])),
    *celled("all steps are flat", "edge", cell([0.0] * 11)),
    *celled("a rise as small as documents can show", "power", cell([-0.2, 0.04, -0.2])),
    *celled("a fall as small as documents can show", "power", cell([-0.2, -0.04, -0.2]), wanted="survived"),
]
