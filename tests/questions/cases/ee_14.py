"""Pairs of times whose ratio is known, with noise that both requests of a pair share."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.early_exit_flops import ExitRuntimeEvidence, RuleTiming
from emad_ref.statistics.units import ByPair
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulated_exits import leg_by_name, near
from tests.questions.simulation import Case

PAIRS = 60


def found(faster: float, saved: float):
    def draw(rng: np.random.Generator) -> ExitRuntimeEvidence:
        shared = 0.01 * np.exp(0.3 * rng.standard_normal(PAIRS))
        full, own = (shared * np.exp(0.05 * rng.standard_normal(PAIRS)) for _ in range(2))
        return ExitRuntimeEvidence((RuleTiming("rule", ByPair(full * faster), ByPair(own), saved),))

    return draw


def truth(faster: float, saved: float):
    """Logs with a deviation of 0.07 over 60 pairs stray by less than 4 × 0.07 / √60 = 0.037."""

    def check(verdict: Verdict) -> None:
        near({"rule: speed": faster}, 0.04 * faster)(verdict)
        near({"rule: FLOPs": saved}, 0.0)(verdict)
        assert leg_by_name(verdict)["rule: speed"].reason == f"FLOPs {saved:.2f} ×"

    return check


CASES = [
    Case("fewer FLOPs, slower", "value", found(0.8, 1.37), draws=10, check=truth(0.8, 1.37)),
    Case("more FLOPs, faster", "value", found(1.5, 0.9), draws=10, check=truth(1.5, 0.9)),
]
