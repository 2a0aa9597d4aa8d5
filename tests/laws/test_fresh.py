"""Timing in fresh processes: how often intervals hold what is true, and what of EMAD-F2 survives, by simulation.

What a process draws once (memory layout, allocator, kernels) moves the ratio of two arms by 1 % from one process to the
next, and each pair moves it by 5 %. Budgets are those that divide their pairs over processes; F2 is decided with all
their batch sizes against two baselines.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from emad_ref.evidence.study import BUDGETS, Budget
from emad_ref.questions.emad_f2 import Found, Timed, decide
from emad_ref.verdict.times import total_ratio
from emad_ref.verdict.units import ByPair
from tests.questions.simulation import asked

BETWEEN, WITHIN = 0.01, 0.05  # standard deviations of the log ratio of two arms
DRAWS, COVERED, WIDEST = 100, 93, 0.03
DIVIDED = [budget for budget in BUDGETS.values() if budget.processes > 1]
ALIKE, UNALIKE = "alike", "unalike"
BASELINES = ("full depth", "generate")


def of(name: str) -> Budget:
    return BUDGETS[name]


def raced(budget: Budget, rng: np.random.Generator, speedup: float = 1.0, neighbour: str = "") -> Timed:
    """One batch size: seconds of the point and of two baselines, which are ``speedup`` times slower."""
    process = np.repeat(np.arange(budget.processes), budget.pairs // budget.processes)
    burst = np.ones((3, budget.pairs))
    if neighbour:  # two stretches of a sixth of all pairs each, in which a core is shared
        for start in rng.integers(0, budget.pairs * 5 // 6, 2):
            stretch = slice(start, start + budget.pairs // 6)
            hit = rng.random((3, budget.pairs // 6)) < (0.5 if neighbour == UNALIKE else 1.0)
            burst[:, stretch] = np.where(hit, 2.0, burst[:, stretch])

    def arm(number: int) -> ByPair:
        layout = BETWEEN / math.sqrt(2) * rng.standard_normal(budget.processes)
        noise = WITHIN / math.sqrt(2) * rng.standard_normal(budget.pairs)
        slower = 1.0 if number == 0 else speedup
        return ByPair(slower * burst[number] * np.exp(layout[process] + noise), process)

    return Timed(arm(0), {name: arm(number) for number, name in enumerate(BASELINES, start=1)})


def verdicts(budget: Budget, speedup: float, neighbour: str = "", draws: int = DRAWS) -> Counter[str]:
    """What F2 says of so many draws."""
    said: Counter[str] = Counter()
    for draw in range(draws):
        rng = np.random.default_rng([draw, budget.rank, round(1000 * speedup)])
        batches = {rows: raced(budget, rng, speedup, neighbour) for rows in budget.batch_sizes}
        said[decide(Found(batches), asked("EMAD-F2", rng)).verdict] += 1
    return said


@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
def test_intervals_over_processes_cover_one_and_are_narrow(budget):
    found = []
    for draw in range(DRAWS):
        timed = raced(budget, np.random.default_rng([draw, budget.rank]))
        found.append(total_ratio(timed.baselines["generate"], timed.adaptive))
    assert sum(each.low <= 1 <= each.high for each in found) >= COVERED
    assert max(each.high - each.low for each in found) / 2 <= WIDEST


def test_pairs_of_one_process_taken_as_independent_would_not_cover():
    """What the processes are for: the same draws, read as 200 independent pairs, with layouts that differ by 3 %.

    Of 200 draws 95 % less four standard errors of a share of so many.
    """
    inside, draws = Counter(), 200
    for draw in range(draws):
        rng = np.random.default_rng(draw)
        process = np.repeat(np.arange(20), 10)
        layout = (0.03 * rng.standard_normal(20))[process]
        a, b = np.exp(layout + 0.05 * rng.standard_normal(200)), np.ones(200)
        for name, of_process in (("processes", process), ("pairs", None)):
            each = total_ratio(ByPair(a, of_process), ByPair(b, of_process))
            inside[name] += each.low <= math.exp((0.03**2 + 0.05**2) / 2) <= each.high
    least = draws * (0.95 - 4 * math.sqrt(0.95 * 0.05 / draws))
    assert inside["processes"] >= least > inside["pairs"]


@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
@pytest.mark.slow  # a hundred simulated verdicts each: `tox -e rates`
def test_no_speed_up_survives_where_arms_do_the_same(budget):
    assert verdicts(budget, 1.0)["survived"] == 0


@pytest.mark.slow
def test_a_speed_up_beyond_the_threshold_survives_under_the_full_budget():
    assert verdicts(of("full"), 1.12)["survived"] >= 80


@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
@pytest.mark.slow
def test_a_speed_up_short_of_the_threshold_does_not(budget):
    said = verdicts(budget, 1.08)
    assert said["survived"] <= 5


@pytest.mark.parametrize("neighbour", [ALIKE, UNALIKE])
@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
@pytest.mark.slow
def test_a_busy_neighbour_flips_no_verdict(budget, neighbour):
    """It may leave a verdict open, and never turns one round: nothing false is falsified or survives."""
    assert verdicts(budget, 1.0, neighbour)["survived"] == 0
    assert verdicts(budget, 1.25, neighbour)["falsified"] == 0
