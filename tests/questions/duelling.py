"""Duels of known outcome for EMAD-R1 to R4, whose rule is one: documents on which a rival does better or worse."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.duels import Found, Met, Side
from emad_ref.sweep.pareto import LEVELS
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByDocument
from tests.questions.simulation import Case


def met(*rises: float, documents: int = 200):
    """EMAD's perplexity over the rival's, as a relative rise, at one net reduction after another."""

    def found(rng: np.random.Generator) -> Found:
        tokens = rng.integers(100, 300, documents)
        level = 2.0 + 0.3 * rng.standard_normal(documents)
        duels = []
        for saved, rise in zip(LEVELS, rises, strict=False):
            both = level + saved + 0.05 * rng.standard_normal((2, documents)) + [[np.log1p(rise)], [0.0]]
            ours, rival = (ByDocument(nats * tokens) for nats in both)
            duels.append(Met(saved, Side(f"emad {saved}", ours), Side(f"rival {saved}", rival)))
        return Found(duels, ByDocument(tokens))

    return found


def names_the_duel(verdict: Verdict) -> None:
    assert "30% net: emad 0.3 against rival 0.3" in verdict.reason
    (lost,) = [leg for leg in verdict.legs if leg.outcome == "falsified"]
    assert abs(lost.estimate - 0.1) < 0.05


def says_that_nothing_met(verdict: Verdict) -> None:
    assert verdict.reason == "no point of both sweeps saves 15 % of FLOPs on validation"


CASES = [
    Case("EMAD wins at every reduction", "holds", met(-0.1, -0.1, -0.2, -0.2), draws=5),
    Case("EMAD loses one duel of three", "fails", met(-0.1, 0.1, -0.1), draws=5, check=names_the_duel),
    Case("both are alike", "edge", met(0.0), draws=50),
    Case("two sweeps that never meet", "premise", met(), check=says_that_nothing_met),
]
