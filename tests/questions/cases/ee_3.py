"""Items that leave a known number of blocks earlier, at a known loss of score."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.early_exits import Contested
from emad_ref.verdict.claims import Verdict
from tests.questions.simulated_exits import LAYERS, contest
from tests.questions.simulation import Case


def found(*legs: tuple[float, float]):
    """(blocks earlier, score gained) per setting."""

    def draw(rng: np.random.Generator) -> Contested:
        made = (contest(rng, f"s{i}", sooner=sooner, gained=gained) for i, (sooner, gained) in enumerate(legs))
        return Contested(tuple(made), LAYERS)

    return draw


def says(name: str):
    def check(verdict: Verdict) -> None:
        assert name in verdict.reason

    return check


CASES = [
    Case("half a block earlier, same score", "holds", found((0.5, 0.0), (0.4, 0.05)), draws=10),
    Case("later in one setting", "fails", found((0.5, 0.0), (-0.4, 0.0)), draws=10, check=says("s1: exit")),
    Case("earlier, but 6 points lost", "fails", found((0.5, -0.06)), draws=10, check=says("s0: score")),
    Case("just as late", "edge", found((0.0, 0.03)), draws=50),
    Case("2 points lost", "edge", found((0.6, -0.02)), draws=50),
]
