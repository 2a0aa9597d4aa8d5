"""Simulated answers under two rules, one earlier or better by a known amount."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.claims.early_exit_answers import (
    SAME_EXITS,
    SAME_SCORES,
    ContrastiveExits,
    PrunedExits,
    RuleComparison,
    RuleComparisons,
    StateCopies,
)
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.simulated_exits import DEEP, ITEMS, LAYERS, PLAIN, Cell, alike, contest, exited, leg_by_name, near
from tests.claims.simulation import SCORED, Case, celled, says

# ---------------------------------------------------------------- EE-3
#
# Items that exit a known number of blocks earlier at a known loss; JSD only waits one block longer.

NONE = RuleComparisons((), LAYERS)


def contrastive_exits(
    *legs: tuple[float, float], cell: Cell = PLAIN
) -> Callable[[np.random.Generator], ContrastiveExits]:
    """Return (blocks earlier, score gained) per setting."""

    def draw(rng: np.random.Generator) -> ContrastiveExits:
        made = (
            contest(rng, f"s{i}", sooner=sooner, gained=gained, cell=cell) for i, (sooner, gained) in enumerate(legs)
        )
        return RuleComparisons(tuple(made), LAYERS), NONE

    return draw


def handicapped(rng: np.random.Generator) -> ContrastiveExits:
    """Both sides equal but for the block that JSD must wait: only the comparison as published shows a difference."""
    published = contest(rng, "s0", sooner=-1.0)
    return RuleComparisons((alike(rng, "s0"),), LAYERS), RuleComparisons((published,), LAYERS)


def itself(cell: Cell) -> Callable[[np.random.Generator], ContrastiveExits]:
    return lambda rng: (RuleComparisons((alike(rng, "s0", cell),), LAYERS), NONE)


def unsolved(rng: np.random.Generator) -> ContrastiveExits:
    reasons = {"qa": Absent("not solved: full depth scores 0.100, an honest guess 0.200", "premise")}
    return RuleComparisons((), LAYERS, unsolved=reasons), NONE


def the_block_decides_nothing(verdict: Verdict) -> None:
    assert verdict.reason == SAME_EXITS
    leg = leg_by_name(verdict)["s0, as published: exit"]
    assert leg.outcome == "measured"
    assert (leg.estimate or 0.0) < -0.8


EE_3 = [
    Case("half a block earlier, same score", "holds", contrastive_exits((0.5, 0.0), (0.4, 0.05)), draws=10),
    Case("later in one setting", "fails", contrastive_exits((0.5, 0.0), (-0.4, 0.0)), draws=10, check=says("s1: exit")),
    Case("earlier, but 6 points lost", "fails", contrastive_exits((0.5, -0.06)), draws=10, check=says("s0: score")),
    *celled("4 points lost", "power", lambda n, icc: contrastive_exits((0.6, -0.04), cell=Cell(n, icc)), n=(200,)),
    Case("a handicap of one block", "premise", handicapped, draws=5, check=the_block_decides_nothing),
    Case("no task is solved", "premise", unsolved, check=says("not solved")),
    *celled("against itself", "tied", lambda n, icc: itself(Cell(n, icc)), draws=1),
    *celled(
        "just as late", "edge", lambda n, icc: contrastive_exits((0.0, 0.03), cell=Cell(n, icc)), n=SCORED, draws=12
    ),
    *celled(
        "2 points lost", "edge", lambda n, icc: contrastive_exits((0.6, -0.02), cell=Cell(n, icc)), n=SCORED, draws=12
    ),
]


# ---------------------------------------------------------------- EE-9
#
# Adaptive pruning that exits a known number of blocks before its rivals, or decides as they do.

SIZES = "k = 54–545 (adaptive) and 4, 4 (fixed)"


def pruning_exits(
    *sooner: float, other: float = 0.0, cell: Cell = PLAIN
) -> Callable[[np.random.Generator], PrunedExits]:
    """Return blocks earlier in the paper's reading, per setting, and in the ``other`` one."""

    def draw(rng: np.random.Generator) -> PrunedExits:
        made = (contest(rng, f"s{i}", sooner=blocks, gained=None, cell=cell) for i, blocks in enumerate(sooner))
        plausible = contest(rng, "s0, plausible top-k", sooner=other, gained=None, cell=cell)
        return RuleComparisons(tuple(made), LAYERS), RuleComparisons((plausible,), LAYERS)

    return draw


def identical(cell: Cell) -> Callable[[np.random.Generator], PrunedExits]:
    def draw(rng: np.random.Generator) -> PrunedExits:
        same = RuleComparisons((alike(rng, "s0", cell, SIZES), alike(rng, "s1", cell, SIZES)), LAYERS)
        return same, same

    return draw


def the_other_reading_is(sooner: float) -> Callable[[Verdict], None]:
    """120 items, deviations of 0.5 blocks: four errors."""

    def check(verdict: Verdict) -> None:
        near({"s0, plausible top-k: exit": sooner}, 0.19)(verdict)
        assert leg_by_name(verdict)["s0, plausible top-k: exit"].outcome == "measured"

    return check


EE_9 = [
    Case("earlier than both", "holds", pruning_exits(0.5, 0.3), draws=15),
    Case("later than one", "fails", pruning_exits(0.5, -0.3), draws=15, check=says("s1: exit")),
    Case(
        "earlier only in the other reading",
        "fails",
        pruning_exits(-0.4, other=0.5),
        15,
        check=the_other_reading_is(0.5),
    ),
    Case(
        "later only in the other reading", "holds", pruning_exits(0.4, other=-0.5), 15, check=the_other_reading_is(-0.5)
    ),
    Case("prunings that decide alike", "premise", identical(PLAIN), 3, check=says(f"exit identically: {SIZES}")),
    *celled("prunings that decide alike", "tied", lambda n, icc: identical(Cell(n, icc)), draws=1),
    *celled(
        "just as late as both", "edge", lambda n, icc: pruning_exits(0.0, 0.0, cell=Cell(n, icc)), n=SCORED, draws=12
    ),
    *celled(
        "just as late as one", "edge", lambda n, icc: pruning_exits(0.8, 0.0, cell=Cell(n, icc)), n=SCORED, draws=12
    ),
]


# ---------------------------------------------------------------- EE-10
#
# Exits and scores at a known distance of either sign.


def weighted_exits(sooner: float, gained: float):
    return lambda rng: RuleComparisons((contest(rng, "task, j=2", sooner=sooner, gained=gained),), LAYERS)


def truth(sooner: float, gained: float):
    """Means of 120 items with deviations of 0.5 blocks and 0.03 differ by less than 4 deviations / √120."""
    exits = near({"task, j=2: exit": sooner}, 0.19)
    scores = near({"task, j=2: score": gained}, 0.012)

    def check(verdict: Verdict) -> None:
        exits(verdict)
        scores(verdict)

    return check


EE_10 = [
    Case("earlier and worse", "value", weighted_exits(0.6, -0.04), draws=10, check=truth(0.6, -0.04)),
    Case("later and better", "value", weighted_exits(-0.6, 0.04), draws=10, check=truth(-0.6, 0.04)),
]


# ---------------------------------------------------------------- EE-12
#
# Copies that change a known share of the texts, the score and the exits, of either sign.


def copies(sooner: float, gained: float):
    """Change every fifth text."""

    def draw(rng: np.random.Generator) -> StateCopies:
        copied = contest(rng, "task, j=2", sooner=sooner, gained=gained)
        same = copied.ours.score.with_values(np.arange(ITEMS) % 5 != 0)
        return RuleComparisons((copied,), LAYERS), [same]

    return draw


def check(sooner: float, gained: float):
    def both(verdict: Verdict) -> None:
        truth(sooner, gained)(verdict)
        same = leg_by_name(verdict)["task, j=2: same text"]
        assert (same.estimate, same.n) == (0.8, ITEMS)
        assert verdict.legs[0].unit == "score gained"

    return both


EE_12 = [
    Case("copies cost score and leave later", "value", copies(-0.4, -0.05), draws=10, check=check(-0.4, -0.05)),
    Case("copies gain score and leave earlier", "value", copies(0.4, 0.05), draws=10, check=check(0.4, 0.05)),
]


# ---------------------------------------------------------------- EE-13
#
# A tuned model that exits a known number of blocks before the pre-trained one.


def tuned_exits(*sooner: float, cell: Cell = PLAIN) -> Callable[[np.random.Generator], RuleComparisons]:
    def draw(rng: np.random.Generator) -> RuleComparisons:
        made = (contest(rng, f"s{i}", sooner=blocks, gained=None, cell=cell) for i, blocks in enumerate(sooner))
        return RuleComparisons(tuple(made), LAYERS)

    return draw


def untouched(rng: np.random.Generator) -> RuleComparisons:
    return RuleComparisons((alike(rng, "s0"),), LAYERS)


def both_exits_are_shown(verdict: Verdict) -> None:
    """The tuned side exits 0.5 blocks below the other. 120 items, deviations of 0.5 and 0.7, uneven lengths."""
    near({"s0, pre-trained: mean exit": DEEP, "s0, tuned: mean exit": DEEP - 0.5}, 0.32)(verdict)


EE_13 = [
    Case("tuning exits earlier", "holds", tuned_exits(0.5, 0.3), draws=15, check=both_exits_are_shown),
    Case("tuning exits later somewhere", "fails", tuned_exits(0.5, -0.3), draws=15),
    Case("tuning touches no exit", "premise", untouched, draws=2, check=says(SAME_EXITS)),
    *celled(
        "tuning changes nothing on average",
        "edge",
        lambda n, icc: tuned_exits(0.0, cell=Cell(n, icc)),
        n=SCORED,
        draws=12,
    ),
]


# ---------------------------------------------------------------- EE-15
#
# Items that early exits answer better or worse than full depth by a known amount.

SHALLOW = 0.6  # share of depth that exits leave


def against_full(
    rng: np.random.Generator, where: str, gained: float | None, cell: Cell, share: float
) -> RuleComparison:
    """Make items with exits after ``share`` of all blocks, and the same items at full depth."""
    made, full = contest(rng, where, gained=gained, cell=cell), np.full(cell.items, float(LAYERS))
    tokens = made.ours.tokens.values
    return RuleComparison(where, exited(made.ours.score, share * full, tokens), exited(made.theirs.score, full, tokens))


def contrastive_scores(
    *gained: float | None, cell: Cell = PLAIN, share: float = SHALLOW
) -> Callable[[np.random.Generator], RuleComparisons]:
    """Return one task per gain, at one minimum layer; None for the same score on every item."""

    def draw(rng: np.random.Generator) -> RuleComparisons:
        made = (against_full(rng, f"t{i}", gain, cell, share) for i, gain in enumerate(gained))
        return RuleComparisons(tuple(made), LAYERS)

    return draw


def few(better: int, worse: int) -> Callable[[np.random.Generator], RuleComparisons]:
    """Full depth solves 50 of 100 items; exits change only ``better`` and ``worse`` of them."""

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


EE_15 = [
    Case("exits gain 3 points", "holds", contrastive_scores(0.03, 0.02), draws=15, check=full_depth_is_shown),
    Case("exits lose 3 points on one task", "fails", contrastive_scores(0.03, -0.03), draws=15),
    Case(
        "exits that hardly exit", "premise", contrastive_scores(0.03, share=0.96), draws=2, check=says("not exercised")
    ),
    Case("exits that change no score", "premise", contrastive_scores(None), draws=2, check=says(SAME_SCORES)),
    *celled(
        "exits change nothing on average",
        "edge",
        lambda n, icc: contrastive_scores(0.0, cell=Cell(n, icc)),
        n=SCORED,
        draws=12,
    ),
    Case("three items better, three worse", "tied", few(3, 3)),
]


CASES = {
    "EE-3": EE_3,
    "EE-9": EE_9,
    "EE-10": EE_10,
    "EE-12": EE_12,
    "EE-13": EE_13,
    "EE-15": EE_15,
}
