"""Timing in fresh processes, simulated: coverage of the intervals, and verdicts of EMAD-F2.

The budgets are those that divide their pairs over processes; ``simulated_replicates`` defines the true ratios.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from pytest_emad.measurements.study import BUDGETS
from pytest_emad.statistics.speedup import estimate_total_speedup, estimate_work_ratio
from pytest_emad.statistics.units import ByPair
from tests.laws.simulated_replicates import ALIKE, UNALIKE, against_itself, verdicts

COVERED, WIDTH = 93, 0.03  # of DRAWS intervals, half of the median
DIVIDED = [budget for budget in BUDGETS.values() if budget.processes > 1]


@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
def test_intervals_over_processes_cover_one_and_are_narrow(budget):
    found = against_itself(budget)
    assert sum(each.low <= 1 <= each.high for each in found) >= COVERED
    assert np.median([each.high - each.low for each in found]) / 2 <= WIDTH


def test_pairs_of_one_process_taken_as_independent_would_not_cover():
    """The reason for processes and blocks: a paired t test of the same draws, with layouts that differ by 3 %.

    A process affects whole blocks of time, also if it is not modelled. The bound for 200 draws is 95 % less four
    standard errors of the share.
    """
    inside, draws = Counter(), 200
    for draw in range(draws):
        rng = np.random.default_rng(draw)
        process = np.repeat(np.arange(20), 10)
        layout = (0.03 * rng.standard_normal(20))[process]
        a, b = np.exp(layout + 0.05 * rng.standard_normal(200)), np.ones(200)
        for name, of_process, ratio_of in (
            ("processes", process, estimate_total_speedup),
            ("blocks", None, estimate_total_speedup),
            ("pairs", None, estimate_work_ratio),
        ):
            each = ratio_of(ByPair(a, of_process), ByPair(b, of_process))
            inside[name] += each.low <= math.exp((0.03**2 + 0.05**2) / 2) <= each.high
    least = draws * (0.95 - 4 * math.sqrt(0.95 * 0.05 / draws))
    assert min(inside["processes"], inside["blocks"]) >= least > inside["pairs"]


@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
@pytest.mark.slow  # a hundred simulated verdicts each: `tox -e rates`
def test_no_speed_up_survives_where_arms_do_the_same(budget):
    assert verdicts(budget, 1.0)["survived"] == 0


@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
@pytest.mark.slow
def test_a_speed_up_beyond_the_threshold_survives(budget):
    assert verdicts(budget, 1.15)["survived"] >= 80


@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
@pytest.mark.slow
def test_a_speed_up_short_of_the_threshold_does_not(budget):
    said = verdicts(budget, 1.08)
    assert said["survived"] <= 5


@pytest.mark.parametrize("neighbour", [ALIKE, UNALIKE])
@pytest.mark.parametrize("budget", DIVIDED, ids=lambda budget: budget.name)
@pytest.mark.slow
def test_a_busy_neighbour_flips_no_verdict(budget, neighbour):
    """It may leave a verdict open, but makes nothing false survive and nothing true falsified."""
    assert verdicts(budget, 1.0, neighbour)["survived"] == 0
    assert verdicts(budget, 1.25, neighbour)["falsified"] == 0
