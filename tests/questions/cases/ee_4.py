"""Adaptive pruning: counted ratios on items, arithmetic beside them, and arithmetic alone."""

from __future__ import annotations

from emad_ref.claims.early_exit_flops import PruningEvidence
from emad_ref.statistics.verdicts import Verdict
from tests.questions.cases.ee_1 import never, pruned
from tests.questions.simulated_exits import near
from tests.questions.simulation import Case


def found(fewer: float, lost: float):
    return lambda rng: PruningEvidence((pruned(rng, "task", fewer, lost),), never(5.0))


def truth(fewer: float, lost: float):
    counted = near({"task: confidence FLOPs": fewer, "simulated, j=2: confidence FLOPs": 5.0}, 1e-12)
    scored = near({"task: score lost": lost}, 0.015)

    def check(verdict: Verdict) -> None:
        counted(verdict)
        scored(verdict)
        assert verdict.estimate == verdict.legs[0].estimate, "items stand first"

    return check


CASES = [
    Case("1.9 times fewer, nothing lost", "value", found(1.9, 0.0), draws=10, check=truth(1.9, 0.0)),
    Case("more FLOPs, 5 points gained", "value", found(0.9, -0.05), draws=10, check=truth(0.9, -0.05)),
    Case("random weights: arithmetic alone", "value", lambda rng: PruningEvidence(never=never(5.0))),
    Case("no files", "premise", lambda rng: PruningEvidence(never=never(5.0), missing={"items": "no files"})),
]
