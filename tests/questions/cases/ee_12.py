"""Copies that change a known share of the texts, the score and the exits, of either sign."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.early_exit_answers import CopyComparison, StateCopyingEvidence
from emad_ref.statistics.verdicts import Verdict
from tests.questions.cases.ee_10 import truth
from tests.questions.simulated_exits import ITEMS, LAYERS, contest, leg_by_name
from tests.questions.simulation import Case


def found(sooner: float, gained: float):
    """Every fifth text changes."""

    def draw(rng: np.random.Generator) -> StateCopyingEvidence:
        copied = contest(rng, "task, j=2", sooner=sooner, gained=gained)
        same = copied.ours.score.like(np.arange(ITEMS) % 5 != 0)
        return StateCopyingEvidence((CopyComparison(copied, same),), LAYERS)

    return draw


def check(sooner: float, gained: float):
    def both(verdict: Verdict) -> None:
        truth(sooner, gained)(verdict)
        same = leg_by_name(verdict)["task, j=2: same text"]
        assert (same.estimate, same.n) == (0.8, ITEMS)
        assert verdict.legs[0].unit == "score gained"

    return both


CASES = [
    Case("copies cost score and leave later", "value", found(-0.4, -0.05), draws=10, check=check(-0.4, -0.05)),
    Case("copies gain score and leave earlier", "value", found(0.4, 0.05), draws=10, check=check(0.4, 0.05)),
]
