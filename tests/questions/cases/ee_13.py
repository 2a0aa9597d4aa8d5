"""A tuned model that leaves a known number of blocks before the pre-trained one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.claims.early_exit_answers import SAME_EXITS, RuleComparisons
from emad_ref.statistics.verdicts import Verdict
from tests.questions.cases.ee_3 import says
from tests.questions.simulated_exits import DEEP, LAYERS, PLAIN, Cell, alike, contest, near
from tests.questions.simulation import Case, celled


def found(*sooner: float, cell: Cell = PLAIN) -> Callable[[np.random.Generator], RuleComparisons]:
    def draw(rng: np.random.Generator) -> RuleComparisons:
        made = (contest(rng, f"s{i}", sooner=blocks, gained=None, cell=cell) for i, blocks in enumerate(sooner))
        return RuleComparisons(tuple(made), LAYERS)

    return draw


def untouched(rng: np.random.Generator) -> RuleComparisons:
    return RuleComparisons((alike(rng, "s0"),), LAYERS)


def both_exits_are_shown(verdict: Verdict) -> None:
    """The tuned side is ours: 0.5 blocks below the other. 120 items, deviations of 0.5 and 0.7, uneven lengths."""
    near({"s0, pre-trained: mean exit": DEEP, "s0, tuned: mean exit": DEEP - 0.5}, 0.32)(verdict)


CASES = [
    Case("tuning exits earlier", "holds", found(0.5, 0.3), draws=15, check=both_exits_are_shown),
    Case("tuning exits later somewhere", "fails", found(0.5, -0.3), draws=15),
    Case("tuning touches no exit", "premise", untouched, draws=2, check=says(SAME_EXITS)),
    *celled("tuning changes nothing on average", "edge", lambda n, icc: found(0.0, cell=Cell(n, icc)), draws=12),
]
