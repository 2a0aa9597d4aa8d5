"""Items that early exits answer a known amount better, or worse, than full depth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.claims.early_exit_answers import SAME_SCORES, RuleComparison, RuleComparisons
from emad_ref.statistics.verdicts import Verdict
from tests.questions.cases.ee_3 import says
from tests.questions.simulated_exits import LAYERS, PLAIN, Cell, contest, exited, near
from tests.questions.simulation import Case, celled

SHALLOW = 0.6  # share of depth that exits leave


def against_full(
    rng: np.random.Generator, where: str, gained: float | None, cell: Cell, share: float
) -> RuleComparison:
    """Exits after ``share`` of all blocks, on every item; full depth beside them."""
    made, full = contest(rng, where, gained=gained, cell=cell), np.full(cell.items, float(LAYERS))
    tokens = made.ours.tokens.values
    return RuleComparison(where, exited(made.ours.score, share * full, tokens), exited(made.theirs.score, full, tokens))


def found(
    *gained: float | None, cell: Cell = PLAIN, share: float = SHALLOW
) -> Callable[[np.random.Generator], RuleComparisons]:
    """One task per gain, at one minimum layer; None for the same score on every item."""

    def draw(rng: np.random.Generator) -> RuleComparisons:
        made = (against_full(rng, f"t{i}", gain, cell, share) for i, gain in enumerate(gained))
        return RuleComparisons(tuple(made), LAYERS)

    return draw


def few(better: int, worse: int) -> Callable[[np.random.Generator], RuleComparisons]:
    """Of 100 items full depth has half solved; exits change only these."""

    def draw(rng: np.random.Generator) -> RuleComparisons:
        cell, full = Cell(100), np.zeros(100)
        full[:50] = 1.0
        early = full.copy()
        early[50 : 50 + better], early[:worse] = 1.0, 0.0
        one, tokens = np.ones(100), np.full(100, 4)
        sides = (
            exited(cell.column(right), LAYERS * share * one, tokens) for right, share in ((early, 0.5), (full, 1.0))
        )
        return RuleComparisons((RuleComparison("t0", *sides),), LAYERS)

    return draw


def full_depth_is_shown(verdict: Verdict) -> None:
    near({"t0: score at full depth": 0.5}, 0.045)(verdict)  # uniform over 0.4: 4 × 0.115 / √120


CASES = [
    Case("exits gain 3 points", "holds", found(0.03, 0.02), draws=15, check=full_depth_is_shown),
    Case("exits lose 3 points on one task", "fails", found(0.03, -0.03), draws=15),
    Case("exits that hardly exit", "premise", found(0.03, share=0.96), draws=2, check=says("not exercised")),
    Case("exits that change no score", "premise", found(None), draws=2, check=says(SAME_SCORES)),
    *celled("exits change nothing on average", "edge", lambda n, icc: found(0.0, cell=Cell(n, icc)), draws=12),
    Case("three items better, three worse", "tied", few(3, 3)),
]
