"""Adaptive pruning that leaves a known number of blocks before its rivals, or decides as they do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.claims.early_exit_answers import RuleComparisons
from tests.questions.cases.ee_3 import says
from tests.questions.simulated_exits import LAYERS, PLAIN, Cell, alike, contest
from tests.questions.simulation import Case, celled

SIZES = "k = 54–545 (adaptive) and 4, 4 (fixed)"


def found(*sooner: float, cell: Cell = PLAIN) -> Callable[[np.random.Generator], RuleComparisons]:
    def draw(rng: np.random.Generator) -> RuleComparisons:
        made = (contest(rng, f"s{i}", sooner=blocks, gained=None, cell=cell) for i, blocks in enumerate(sooner))
        return RuleComparisons(tuple(made), LAYERS)

    return draw


def identical(cell: Cell) -> Callable[[np.random.Generator], RuleComparisons]:
    return lambda rng: RuleComparisons((alike(rng, "s0", cell, SIZES), alike(rng, "s1", cell, SIZES)), LAYERS)


CASES = [
    Case("earlier than both", "holds", found(0.5, 0.3), draws=15),
    Case("later than one", "fails", found(0.5, -0.3), draws=15, check=says("s1: exit")),
    Case("prunings that decide alike", "premise", identical(PLAIN), 3, check=says(f"exit identically: {SIZES}")),
    *celled("prunings that decide alike", "tied", lambda n, icc: identical(Cell(n, icc)), draws=1),
    *celled("just as late as both", "edge", lambda n, icc: found(0.0, 0.0, cell=Cell(n, icc)), draws=12),
    *celled("just as late as one", "edge", lambda n, icc: found(0.8, 0.0, cell=Cell(n, icc)), draws=12),
]
