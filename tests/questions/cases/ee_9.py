"""Adaptive pruning that leaves a known number of blocks before its rivals."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.early_exits import Contested
from tests.questions.cases.ee_3 import says
from tests.questions.simulated_exits import LAYERS, contest
from tests.questions.simulation import Case


def found(*sooner: float):
    def draw(rng: np.random.Generator) -> Contested:
        made = (contest(rng, f"s{i}", sooner=blocks, gained=None) for i, blocks in enumerate(sooner))
        return Contested(tuple(made), LAYERS)

    return draw


CASES = [
    Case("earlier than both", "holds", found(0.5, 0.3), draws=15),
    Case("later than one", "fails", found(0.5, -0.3), draws=15, check=says("s1: exit")),
    Case("just as late as both", "edge", found(0.0, 0.0), draws=40),
    Case("just as late as one", "edge", found(0.8, 0.0), draws=40),
]
