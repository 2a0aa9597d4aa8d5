"""Calibration sets that share no item, on losses whose true risk is known, set by set and threshold by threshold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.claims.ee_7 import THRESHOLDS, PromiseEvidence
from emad_ref.measurements.early_exits import SET_SIZE, TextConsistency
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulated_exits import leg_by_name
from tests.questions.simulation import Case

LAYERS = 8
MEAN_EXIT = np.linspace(7.0, 3.0, len(THRESHOLDS))
RISK = (0.0, 0.01, 0.2, 0.4, 0.6)  # of each threshold, strict to loose
POOL, SETS = 200, 64


def losses(rng: np.random.Generator, *shape: int, risk: tuple[float, ...] = RISK) -> np.ndarray:
    """[..., λ] 0 or 1: an item that strays at a threshold strays at every looser one."""
    return (rng.random(shape)[..., None] < np.array(risk)).astype(float)


def found(
    *misled: float, sets: int = SETS, pool: int = POOL, risk: tuple[float, ...] = RISK
) -> Callable[[np.random.Generator], PromiseEvidence]:
    """One task per share of sets that see no loss at all, and so choose the loosest threshold, whatever it risks."""

    def draw(rng: np.random.Generator) -> PromiseEvidence:
        tasks = {}
        for number, share in enumerate(misled):
            drawn = losses(rng, sets, SET_SIZE, risk=risk)
            drawn[rng.random(sets) < share] = 0.0
            tasks[f"task {number}"] = TextConsistency(losses(rng, pool, risk=risk), drawn, MEAN_EXIT)
        return PromiseEvidence(tasks, LAYERS)

    return draw


def safe_and_useful(verdict: Verdict) -> None:
    legs = leg_by_name(verdict)
    assert legs["task 0: sets that chose any exit"].estimate == 1.0, "without a loss the strictest always passes"
    saved = legs["task 0: blocks saved per token"].estimate
    assert saved is not None
    assert 1.0 <= saved <= 2.5, "λ = 0.99 saves a block and 0.9 two; 0.7 loses more than is tolerated"
    assert abs((legs["task 0, λ=0.4: difference from full depth"].estimate or 0.0) - 0.4) <= 0.14  # 4 × 0.49 / √200


def says(*parts: str) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        assert all(part in verdict.reason for part in parts), verdict.reason

    return check


def never_survives(reason: str) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        assert verdict.verdict == "inconclusive"
        assert reason in verdict.reason

    return check


HARMLESS = (0.0, 0.0, 0.01, 0.02, 0.03)
HOPELESS = (0.09, 0.2, 0.3, 0.4, 0.6)

CASES = [
    Case("Learn-then-Test itself", "holds", found(0.0), 20, least=0.9, check=safe_and_useful),
    Case("a fifth of the sets see no loss", "fails", found(0.0, 0.2), draws=20, least=0.9, check=says("task 1")),
    Case("a tenth, twice what is allowed", "power", found(0.1, sets=400), draws=5),
    Case("a twentieth of the sets", "edge", found(0.05), draws=60),
    Case("a twentieth, on a small pool", "edge", found(0.05, pool=100), draws=60),
    Case("no threshold strays", "premise", found(0.0, risk=HARMLESS), 5, check=says("nothing could break")),
    Case("most sets certify nothing", "tied", found(0.0, risk=HOPELESS), 5, check=never_survives("half are needed")),
    Case("two sets", "tied", found(0.0, sets=2), 5, check=never_survives("about 63 calibration sets")),
    *(
        Case(f"a pool of {pool}", "tied", found(0.0, pool=pool), 3, check=never_survives("at least 100 are needed"))
        for pool in (30, 60)
    ),
]
