"""Counted savings of a known size, and items of which pruning loses a known part of the score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from emad_ref.claims.early_exit_answers import SAME_SCORES
from emad_ref.claims.early_exit_flops import NeverExitingToken, PruningComparison, PruningEvidence
from emad_ref.measurements.early_exits import FlopsPerItem, flop_saving
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulated_exits import PLAIN, Cell, leg_by_name, scores
from tests.questions.simulation import Case, celled

FULL_HEAD, BLOCKS, ENCODER = 2e6, 5e6, 3e6  # FLOPs per item


def pruned(rng: np.random.Generator, where: str, fewer: float, lost: float, cell: Cell = PLAIN) -> PruningComparison:
    """Confidence ``fewer`` times as cheap, blocks and encoder as before."""
    before, after = FlopsPerItem(FULL_HEAD, BLOCKS, ENCODER), FlopsPerItem(FULL_HEAD / fewer, BLOCKS, ENCODER)
    ours, theirs = scores(rng, -lost, cell)
    return PruningComparison(where, flop_saving(before, after), theirs, ours)


def never(fewer: float, name: str = "simulated") -> tuple[NeverExitingToken, ...]:
    return (
        NeverExitingToken(
            f"{name}, j=2",
            flop_saving(FlopsPerItem(FULL_HEAD, BLOCKS, 0.0), FlopsPerItem(FULL_HEAD / fewer, BLOCKS, 0.0)),
        ),
    )


def found(fewer: float, *lost: float, cell: Cell = PLAIN):
    """One task per loss; the token that never exits saves as much."""

    def draw(rng: np.random.Generator) -> PruningEvidence:
        each = tuple(pruned(rng, f"task {i}", fewer, loss, cell) for i, loss in enumerate(lost))
        return PruningEvidence(each, never(fewer), never(7.4, "papers"))

    return draw


def untouched(rng: np.random.Generator) -> PruningEvidence:
    """A hundredfold and more, and not one score changed."""
    one = pruned(rng, "task 0", 200.0, 0.0)
    return PruningEvidence((replace(one, after=one.before),), never(200.0), never(7.4, "papers"))


def says_nothing_of_scores(verdict: Verdict) -> None:
    assert (verdict.verdict, verdict.reason.endswith(SAME_SCORES + ")")) == ("inconclusive", True)


def geometry_alone(fewer: float):
    return lambda rng: PruningEvidence((), never(fewer), never(7.4, "papers"))


def blames_the_count(verdict: Verdict) -> None:
    assert verdict.estimate == 40.0
    assert verdict.legs[0].outcome == "falsified"
    assert leg_by_name(verdict)["task 0: all FLOPs, encoder included"].estimate == 10e6 / (8e6 + FULL_HEAD / 40)


def blames_the_score(verdict: Verdict) -> None:
    assert "task 1: score" in verdict.reason


def items_decide(verdict: Verdict) -> None:
    assert leg_by_name(verdict)["simulated, j=2: confidence FLOPs"].outcome == "measured"


CASES = [
    Case("two hundred times fewer, nothing lost", "holds", found(200.0, 0.0, 0.0), draws=10, check=items_decide),
    Case("forty times fewer", "fails", found(40.0, 0.0), draws=5, check=blames_the_count),
    Case("a hundredfold, but 5 points lost on one task", "fails", found(100.0, 0.0, 0.05), 10, check=blames_the_score),
    *celled("4 points lost", "power", lambda n, icc: found(200.0, 0.04, cell=Cell(n, icc)), n=(200,)),
    Case("pruning changes no score", "tied", untouched, check=says_nothing_of_scores),
    *celled("2 points lost", "edge", lambda n, icc: found(200.0, 0.02, cell=Cell(n, icc)), draws=12),
    Case("no items, geometry falls short", "fails", geometry_alone(7.4)),
    Case("no items, geometry just reaches it", "holds", geometry_alone(100.0)),
]
