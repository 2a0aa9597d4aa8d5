"""Documents whose profile of entropy has a known slope over layers, steep or flat, falling or rising."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.questions.emad_e11 import Found
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByDocument
from tests.questions.simulation import Case

DOCUMENTS, LAYERS = 60, 6


def sloped(slope: float, margin: str = "emad m=0.20", gain: float = 0.25):
    """``slope`` nats per layer, between documents with a deviation of 0.05 nats."""

    def found(rng: np.random.Generator) -> Found:
        tokens = rng.integers(50, 200, DOCUMENTS)
        means = 3.0 + slope * np.arange(LAYERS) + 0.05 * rng.standard_normal((DOCUMENTS, LAYERS))
        return Found(ByDocument.distinct(means * tokens[:, None]), ByDocument.distinct(tokens), margin, gain)

    return found


def reports(slope: float, margin: str = "emad m=0.20", gain: float = 0.25) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        gained, steep = verdict.legs
        assert gained.name == f"net reduction at equal quality ({margin})"
        assert (gained.estimate, gained.n, gained.interval) == (gain, DOCUMENTS, None)
        assert abs(steep.estimate - slope) < 0.02
        assert steep.interval[0] < steep.estimate < steep.interval[1]

    return check


CASES = [
    Case("a steep profile", "value", sloped(-0.4), draws=5, check=reports(-0.4)),
    Case("a profile that rises", "value", sloped(0.2), draws=5, check=reports(0.2)),
    Case(
        "a flat one that gains nothing", "value", sloped(0.0, "no margin", 0.0), 5, check=reports(0.0, "no margin", 0.0)
    ),
]
