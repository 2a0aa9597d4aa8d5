"""Items that leave a known number of blocks earlier, at a known loss; and JSD that only has to wait a block longer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.claims.early_exit_answers import SAME_EXITS, ContrastiveExitEvidence, RuleComparisons
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulated_exits import LAYERS, PLAIN, Cell, alike, contest, leg_by_name
from tests.questions.simulation import Case, celled

NONE = RuleComparisons((), LAYERS)


def found(*legs: tuple[float, float], cell: Cell = PLAIN) -> Callable[[np.random.Generator], ContrastiveExitEvidence]:
    """(blocks earlier, score gained) per setting."""

    def draw(rng: np.random.Generator) -> ContrastiveExitEvidence:
        made = (
            contest(rng, f"s{i}", sooner=sooner, gained=gained, cell=cell) for i, (sooner, gained) in enumerate(legs)
        )
        return ContrastiveExitEvidence(RuleComparisons(tuple(made), LAYERS), NONE)

    return draw


def handicapped(rng: np.random.Generator) -> ContrastiveExitEvidence:
    """Alike but for the block that JSD must wait: only the comparison as published shows a difference."""
    published = contest(rng, "s0", sooner=-1.0)
    return ContrastiveExitEvidence(RuleComparisons((alike(rng, "s0"),), LAYERS), RuleComparisons((published,), LAYERS))


def itself(cell: Cell) -> Callable[[np.random.Generator], ContrastiveExitEvidence]:
    return lambda rng: ContrastiveExitEvidence(RuleComparisons((alike(rng, "s0", cell),), LAYERS), NONE)


def unsolved(rng: np.random.Generator) -> ContrastiveExitEvidence:
    return ContrastiveExitEvidence(
        RuleComparisons((), LAYERS, unsolved={"qa": "not solved: full depth scores 0.100, an honest guess 0.200"}), NONE
    )


def says(name: str) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        assert name in verdict.reason

    return check


def the_block_decides_nothing(verdict: Verdict) -> None:
    assert verdict.reason == SAME_EXITS
    leg = leg_by_name(verdict)["s0, as published: exit"]
    assert leg.outcome == "measured"
    assert (leg.estimate or 0.0) < -0.8


CASES = [
    Case("half a block earlier, same score", "holds", found((0.5, 0.0), (0.4, 0.05)), draws=10),
    Case("later in one setting", "fails", found((0.5, 0.0), (-0.4, 0.0)), draws=10, check=says("s1: exit")),
    Case("earlier, but 6 points lost", "fails", found((0.5, -0.06)), draws=10, check=says("s0: score")),
    *celled("4 points lost", "power", lambda n, icc: found((0.6, -0.04), cell=Cell(n, icc)), n=(200,)),
    Case("a handicap of one block", "premise", handicapped, draws=5, check=the_block_decides_nothing),
    Case("no task is solved", "premise", unsolved, check=says("not solved")),
    *celled("against itself", "tied", lambda n, icc: itself(Cell(n, icc)), draws=1),
    *celled("just as late", "edge", lambda n, icc: found((0.0, 0.03), cell=Cell(n, icc)), draws=12),
    *celled("2 points lost", "edge", lambda n, icc: found((0.6, -0.02), cell=Cell(n, icc)), draws=12),
]
