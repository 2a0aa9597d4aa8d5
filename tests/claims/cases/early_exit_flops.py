"""Simulated FLOPs, scores and times of known size, with and without pruning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.claims.early_exit_answers import SAME_SCORES
from pytest_emad.claims.early_exit_flops import (
    NeverExiting,
    PrunedModel,
    PruningComparison,
    PruningEvidence,
    RuleTimings,
    make_published_pruning_setting,
)
from pytest_emad.measurements.early_exits import ItemFlopsByPart, compute_flop_ratios
from pytest_emad.statistics.units import ByPair
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.simulated_exits import PLAIN, Cell, leg_by_name, near, scores
from tests.claims.simulation import SCORED, Case, celled

# ---------------------------------------------------------------- EE-1
#
# Counted savings of known size, and items on which pruning loses a known part of the score.

FULL_HEAD, BLOCKS, ENCODER = 2e6, 5e6, 3e6  # FLOPs per item


def pruned(rng: np.random.Generator, where: str, fewer: float, lost: float, cell: Cell = PLAIN) -> PruningComparison:
    """Make the confidence ``fewer`` times as cheap, with blocks and encoder unchanged."""
    before, after = ItemFlopsByPart(FULL_HEAD, BLOCKS, ENCODER), ItemFlopsByPart(FULL_HEAD / fewer, BLOCKS, ENCODER)
    ours, theirs = scores(rng, -lost, cell)
    return PruningComparison(where, compute_flop_ratios(before, after), theirs, ours)


def never(fewer: float, name: str = "simulated") -> NeverExiting:
    before, after = ItemFlopsByPart(FULL_HEAD, BLOCKS, 0.0), ItemFlopsByPart(FULL_HEAD / fewer, BLOCKS, 0.0)
    return {f"{name}, j=2": compute_flop_ratios(before, after)}


def fixed_pruning(fewer: float, *lost: float, cell: Cell = PLAIN):
    """Return one task per loss; the token that never exits saves as much."""

    def draw(rng: np.random.Generator) -> PruningEvidence:
        each = tuple(pruned(rng, f"task {i}", fewer, loss, cell) for i, loss in enumerate(lost))
        return PruningEvidence(each, never(fewer), never(7.4, "papers"))

    return draw


def untouched(rng: np.random.Generator) -> PruningEvidence:
    """Savings of a hundredfold and more, and no changed score."""
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


EE_1 = [
    Case(
        "two hundred times fewer, nothing lost", "holds", fixed_pruning(200.0, 0.0, 0.0), draws=10, check=items_decide
    ),
    Case("forty times fewer", "fails", fixed_pruning(40.0, 0.0), draws=5, check=blames_the_count),
    Case(
        "a hundredfold, but 5 points lost on one task",
        "fails",
        fixed_pruning(100.0, 0.0, 0.05),
        10,
        check=blames_the_score,
    ),
    *celled("4 points lost", "power", lambda n, icc: fixed_pruning(200.0, 0.04, cell=Cell(n, icc)), n=(200,)),
    Case("pruning changes no score", "tied", untouched, check=says_nothing_of_scores),
    *celled("2 points lost", "edge", lambda n, icc: fixed_pruning(200.0, 0.02, cell=Cell(n, icc)), n=SCORED, draws=12),
    Case("no items, geometry falls short", "fails", geometry_alone(7.4)),
    Case("no items, geometry just reaches it", "holds", geometry_alone(100.0)),
]


# ---------------------------------------------------------------- EE-2
#
# Decaying against fixed pruning: a ratio of counted FLOPs and a known difference of scores of either sign.


def decaying_pruning(fewer: float, lost: float):
    return lambda rng: PruningEvidence((pruned(rng, "task", fewer, lost),))


def decaying_truth(fewer: float, lost: float):
    """Counted legs are exact; a mean of 120 items errs by less than 0.015."""
    decoding = (FULL_HEAD + BLOCKS) / (FULL_HEAD / fewer + BLOCKS)
    counted = near({"task: confidence FLOPs": fewer, "task: decoder and confidence FLOPs": decoding}, 1e-12)
    scored = near({"task: score lost": lost}, 0.015)

    def check(verdict) -> None:
        counted(verdict)
        scored(verdict)

    return check


EE_2 = [
    Case(
        "half the FLOPs, 2 points lost", "value", decaying_pruning(2.0, 0.02), draws=10, check=decaying_truth(2.0, 0.02)
    ),
    Case(
        "more FLOPs, 3 points gained", "value", decaying_pruning(0.8, -0.03), draws=10, check=decaying_truth(0.8, -0.03)
    ),
]


# ---------------------------------------------------------------- EE-4
#
# Adaptive pruning: counted ratios on items with the arithmetic, and the arithmetic alone.


def adaptive_pruning(fewer: float, lost: float):
    return lambda rng: PruningEvidence((pruned(rng, "task", fewer, lost),), never(5.0))


def adaptive_truth(fewer: float, lost: float):
    counted = near({"task: confidence FLOPs": fewer, "simulated, j=2: confidence FLOPs": 5.0}, 1e-12)
    scored = near({"task: score lost": lost}, 0.015)

    def check(verdict: Verdict) -> None:
        counted(verdict)
        scored(verdict)
        assert verdict.estimate == verdict.legs[0].estimate, "legs of items come first"

    return check


def adaptive_by_reading(rng: np.random.Generator) -> PruningEvidence:
    """The paper's reading exits nowhere and saves less; the other one loses score."""
    return PruningEvidence((pruned(rng, "qa, paper", 0.9, 0.0), pruned(rng, "qa, plausible top-k", 1.9, 0.05)))


def readings_apart(verdict: Verdict) -> None:
    near({"qa, paper: confidence FLOPs": 0.9, "qa, plausible top-k: confidence FLOPs": 1.9}, 1e-12)(verdict)
    near({"qa, paper: score lost": 0.0, "qa, plausible top-k: score lost": 0.05}, 0.015)(verdict)


EE_4 = [
    Case(
        "1.9 times fewer, nothing lost", "value", adaptive_pruning(1.9, 0.0), draws=10, check=adaptive_truth(1.9, 0.0)
    ),
    Case(
        "more FLOPs, 5 points gained", "value", adaptive_pruning(0.9, -0.05), draws=10, check=adaptive_truth(0.9, -0.05)
    ),
    Case("readings that differ", "value", adaptive_by_reading, draws=10, check=readings_apart),
    Case("random weights: arithmetic alone", "value", lambda rng: PruningEvidence(never=never(5.0))),
    Case("no files", "premise", lambda rng: PruningEvidence(never=never(5.0), missing={"items": Absent("no files")})),
]


# ---------------------------------------------------------------- EE-8
#
# The formula on vocabularies and depths with a value that follows by arithmetic.


def formula(*pruned: PrunedModel):
    return lambda rng: (pruned, never(7.4))


def exactly_a_hundred(verdict: Verdict) -> None:
    """398·200 / (2·199 + 398) = 79,600 / 796: a value at the threshold is supported."""
    assert (verdict.estimate, verdict.verdict) == (100.0, "survived")


def bounded(verdict: Verdict) -> None:
    """L/j of 24 layers; the deciding one is the farthest below."""
    bounds = [leg.estimate for leg in verdict.legs if "bound" in leg.name]
    assert bounds == [12.0, 24 / 7]
    kept = 842  # ⌊35000 / (1 + 139·7/24)⌋
    assert leg_by_name(verdict)[f"t5-large, j=7: formula at k={kept}"].outcome == "falsified"
    assert verdict.reason.endswith(f"formula at k={kept} (counted)")


EE_8 = [
    Case("two hundred layers, left after the first", "holds", formula((200, 32_128, 1, 20))),
    Case(
        "24 layers of T5",
        "fails",
        formula(make_published_pruning_setting(2, 24, 32_128), make_published_pruning_setting(7, 24, 32_128)),
        check=bounded,
    ),
    Case("exactly a hundred", "holds", formula((200, 398, 1, 2)), check=exactly_a_hundred),
]


# ---------------------------------------------------------------- EE-14
#
# Pairs of times with a known ratio, and noise that both requests of a pair share.

PAIRS = 60


def runtimes(faster: float, saved: float):
    def draw(rng: np.random.Generator) -> RuleTimings:
        shared = 0.01 * np.exp(0.3 * rng.standard_normal(PAIRS))
        full, own = (shared * np.exp(0.05 * rng.standard_normal(PAIRS)) for _ in range(2))
        return {"rule": (ByPair(full * faster), ByPair(own), saved)}

    return draw


def runtime_truth(faster: float, saved: float):
    """Logs with a deviation of 0.07 over 60 pairs err by less than 4 × 0.07 / √60 = 0.037."""

    def check(verdict: Verdict) -> None:
        near({"rule: speed": faster}, 0.04 * faster)(verdict)
        near({"rule: FLOPs": saved}, 0.0)(verdict)
        assert leg_by_name(verdict)["rule: speed"].reason == f"FLOPs {saved:.2f} ×"

    return check


EE_14 = [
    Case("fewer FLOPs, slower", "value", runtimes(0.8, 1.37), draws=10, check=runtime_truth(0.8, 1.37)),
    Case("more FLOPs, faster", "value", runtimes(1.5, 0.9), draws=10, check=runtime_truth(1.5, 0.9)),
]


CASES = {
    "EE-1": EE_1,
    "EE-2": EE_2,
    "EE-4": EE_4,
    "EE-8": EE_8,
    "EE-14": EE_14,
}
