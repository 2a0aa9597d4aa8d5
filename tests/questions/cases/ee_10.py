"""Exits and scores a known way apart, of either sign."""

from __future__ import annotations

from emad_ref.claims.early_exit_answers import RuleComparisons
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulated_exits import LAYERS, contest, near
from tests.questions.simulation import Case


def found(sooner: float, gained: float):
    return lambda rng: RuleComparisons((contest(rng, "task, j=2", sooner=sooner, gained=gained),), LAYERS)


def truth(sooner: float, gained: float):
    """Means of 120 items with deviations of 0.5 blocks and 0.03 stray by less than 4 deviations / √120."""
    exits = near({"task, j=2: exit": sooner}, 0.19)
    scores = near({"task, j=2: score": gained}, 0.012)

    def check(verdict: Verdict) -> None:
        exits(verdict)
        scores(verdict)

    return check


CASES = [
    Case("earlier and worse", "value", found(0.6, -0.04), draws=10, check=truth(0.6, -0.04)),
    Case("later and better", "value", found(-0.6, 0.04), draws=10, check=truth(-0.6, 0.04)),
]
