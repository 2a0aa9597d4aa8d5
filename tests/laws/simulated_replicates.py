"""Simulated races of EMAD-F2 in fresh processes: the ratio varies between processes and between pairs.

python -m tests.laws.simulated_replicates      # the table of docs/methods.md, "Timing"; some minutes
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
from tabulate import tabulate

from pytest_emad.claims.speedup import SpeedupEvidence, TimedBatch, decide_speedup
from pytest_emad.measurements.study import BUDGETS, Budget
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.speedup import estimate_total_speedup
from pytest_emad.statistics.units import ByPair
from tests.claims.simulation import asked

BETWEEN, WITHIN = 0.01, 0.05  # standard deviations of the log ratio of two arms
DRAWS = 100
ALIKE, UNALIKE = "alike", "unalike"  # slowdown of a pair's arms by a neighbour
BASELINES = ("full depth", "generate")
SPEEDUPS = (1.08, 1.15, 1.2)


def raced(budget: Budget, rng: np.random.Generator, speedup: float = 1.0, neighbour: str = "") -> TimedBatch:
    """Return one batch size: seconds of the point and of two baselines, which are ``speedup`` times slower."""
    process = np.repeat(np.arange(budget.processes), budget.pairs // budget.processes)
    burst = np.ones((3, budget.pairs))
    if neighbour:  # two stretches, each a sixth of all pairs, with a shared core
        for start in rng.integers(0, budget.pairs * 5 // 6, 2):
            stretch = slice(start, start + budget.pairs // 6)
            hit = rng.random((3, budget.pairs // 6)) < (0.5 if neighbour == UNALIKE else 1.0)
            burst[:, stretch] = np.where(hit, 2.0, burst[:, stretch])

    def arm(number: int) -> ByPair:
        layout = BETWEEN / math.sqrt(2) * rng.standard_normal(budget.processes)
        noise = WITHIN / math.sqrt(2) * rng.standard_normal(budget.pairs)
        slower = 1.0 if number == 0 else speedup
        return ByPair(slower * burst[number] * np.exp(layout[process] + noise), process)

    return TimedBatch(arm(0), {name: arm(number) for number, name in enumerate(BASELINES, start=1)})


def verdicts(budget: Budget, speedup: float, neighbour: str = "") -> Counter[str]:
    """Return F2's verdicts on ``DRAWS`` draws, all batch sizes of the budget against both baselines."""
    said: Counter[str] = Counter()
    for draw in range(DRAWS):
        rng = np.random.default_rng([draw, budget.rank, round(1000 * speedup)])
        batches = {rows: raced(budget, rng, speedup, neighbour) for rows in budget.batch_sizes}
        said[decide_speedup(SpeedupEvidence(batches), asked("EMAD-F2", rng)).verdict] += 1
    return said


def against_itself(budget: Budget) -> list[Estimate]:
    """Return A/A results: one batch size against one equal baseline, ``DRAWS`` times."""
    found = []
    for draw in range(DRAWS):
        timed = raced(budget, np.random.default_rng([draw, budget.rank]))
        found.append(estimate_total_speedup(timed.baselines["generate"], timed.adaptive))
    return found


def _row(budget: Budget) -> dict[str, object]:
    found = against_itself(budget)
    survives = {f"{speedup} × survives": verdicts(budget, speedup)["survived"] for speedup in SPEEDUPS}
    return {
        "pairs, processes": f"{budget.pairs}, {budget.processes}",
        "A/A intervals cover 1": sum(each.low <= 1 <= each.high for each in found),
        "widest, ± %": f"{50 * max(each.high - each.low for each in found):.1f}",
        **survives,
    }


if __name__ == "__main__":
    standard, full = BUDGETS["standard"], BUDGETS["full"]
    fewer = [replace(standard, pairs=60, processes=processes) for processes in (10, 20, 30)]
    compared = (*fewer, replace(standard, processes=12), standard, replace(full, processes=10), full)
    print(tabulate([_row(budget) for budget in compared], headers="keys", tablefmt="github"))
