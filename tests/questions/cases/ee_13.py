"""A tuned model that leaves a known number of blocks before the pre-trained one."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.early_exits import Contested
from emad_ref.verdict.claims import Verdict
from tests.questions.simulated_exits import DEEP, LAYERS, contest, near
from tests.questions.simulation import Case


def found(*sooner: float):
    def draw(rng: np.random.Generator) -> Contested:
        made = (contest(rng, f"s{i}", sooner=blocks, gained=None) for i, blocks in enumerate(sooner))
        return Contested(tuple(made), LAYERS)

    return draw


def both_exits_are_shown(verdict: Verdict) -> None:
    """The tuned side is ours: 0.5 blocks below the other. 120 items, deviations of 0.5 and 0.7, uneven lengths."""
    near({"s0, pre-trained: mean exit": DEEP, "s0, tuned: mean exit": DEEP - 0.5}, 0.32)(verdict)


CASES = [
    Case("tuning exits earlier", "holds", found(0.5, 0.3), draws=15, check=both_exits_are_shown),
    Case("tuning exits later somewhere", "fails", found(0.5, -0.3), draws=15),
    Case("tuning changes nothing", "edge", found(0.0), draws=80),
]
