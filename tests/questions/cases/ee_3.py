"""Items that leave a known number of blocks earlier, at a known loss; and JSD that only has to wait a block longer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.questions.early_exits import SAME_EXITS, Contested
from emad_ref.questions.ee_3 import Found
from emad_ref.verdict.claims import Verdict
from tests.questions.simulated_exits import LAYERS, PLAIN, Cell, alike, contest, leg_by_name
from tests.questions.simulation import Case, celled

NONE = Contested((), LAYERS)


def found(*legs: tuple[float, float], cell: Cell = PLAIN) -> Callable[[np.random.Generator], Found]:
    """(blocks earlier, score gained) per setting."""

    def draw(rng: np.random.Generator) -> Found:
        made = (
            contest(rng, f"s{i}", sooner=sooner, gained=gained, cell=cell) for i, (sooner, gained) in enumerate(legs)
        )
        return Found(Contested(tuple(made), LAYERS), NONE)

    return draw


def handicapped(rng: np.random.Generator) -> Found:
    """Alike but for the block that JSD must wait: only the comparison as published shows a difference."""
    published = contest(rng, "s0", sooner=-1.0)
    return Found(Contested((alike(rng, "s0"),), LAYERS), Contested((published,), LAYERS))


def itself(cell: Cell) -> Callable[[np.random.Generator], Found]:
    return lambda rng: Found(Contested((alike(rng, "s0", cell),), LAYERS), NONE)


def unsolved(rng: np.random.Generator) -> Found:
    return Found(
        Contested((), LAYERS, unsolved={"qa": "not solved: full depth scores 0.100, an honest guess 0.200"}), NONE
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
