"""Documents whose profile of entropy has a known slope over layers, steep or flat, falling or rising."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.claims.emad_e11 import FlatProfileEvidence
from emad_ref.measurements.pareto import MarginGain
from emad_ref.statistics.units import ByDocument
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case

DOCUMENTS, LAYERS = 60, 6


GAINED = MarginGain("emad m=0.20", 0.25, 0.004)
NOTHING = MarginGain("no margin", 0.0, 0.0)


def sloped(slope: float, gain: MarginGain = GAINED):
    """``slope`` nats per layer, between documents with a deviation of 0.05 nats."""

    def found(rng: np.random.Generator) -> FlatProfileEvidence:
        tokens = rng.integers(50, 200, DOCUMENTS)
        means = 3.0 + slope * np.arange(LAYERS) + 0.05 * rng.standard_normal((DOCUMENTS, LAYERS))
        return FlatProfileEvidence(ByDocument.distinct(means * tokens[:, None]), ByDocument.distinct(tokens), gain)

    return found


def reports(slope: float, gain: MarginGain = GAINED) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        gained, lost, steep = verdict.legs
        assert gained.name == f"net reduction at equal quality ({gain.point}, chosen on validation)"
        assert (gained.estimate, gained.n, gained.interval) == (gain.saved, DOCUMENTS, None)
        assert (lost.estimate, lost.unit, lost.interval) == (gain.rise, "relative rise", None)
        assert abs(steep.estimate - slope) < 0.02
        assert steep.interval[0] < steep.estimate < steep.interval[1]

    return check


CASES = [
    Case("a steep profile", "value", sloped(-0.4), draws=5, check=reports(-0.4)),
    Case("a profile that rises", "value", sloped(0.2), draws=5, check=reports(0.2)),
    Case("a flat one that gains nothing", "value", sloped(0.0, NOTHING), draws=5, check=reports(0.0, NOTHING)),
]
