"""Decaying against fixed pruning: a ratio of counted FLOPs and a known part of the score, of either sign."""

from __future__ import annotations

from emad_ref.claims.early_exit_flops import PruningEvidence
from tests.questions.cases.ee_1 import BLOCKS, FULL_HEAD, pruned
from tests.questions.simulated_exits import near
from tests.questions.simulation import Case


def found(fewer: float, lost: float):
    return lambda rng: PruningEvidence((pruned(rng, "task", fewer, lost),))


def truth(fewer: float, lost: float):
    """Counted legs are exact; a mean of 120 items strays by less than 0.015."""
    decoding = (FULL_HEAD + BLOCKS) / (FULL_HEAD / fewer + BLOCKS)
    counted = near({"task: confidence FLOPs": fewer, "task: decoder and confidence FLOPs": decoding}, 1e-12)
    scored = near({"task: score lost": lost}, 0.015)

    def check(verdict) -> None:
        counted(verdict)
        scored(verdict)

    return check


CASES = [
    Case("half the FLOPs, 2 points lost", "value", found(2.0, 0.02), draws=10, check=truth(2.0, 0.02)),
    Case("more FLOPs, 3 points gained", "value", found(0.8, -0.03), draws=10, check=truth(0.8, -0.03)),
]
