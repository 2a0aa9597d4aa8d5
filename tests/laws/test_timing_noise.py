"""Verdicts on time on unsteady machines: simulated noise of known truth, and recorded A/A races."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from pytest_emad.claims.speedup import SpeedupEvidence, TimedBatch, decide_speedup
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.speedup import (
    estimate_speedup_per_request,
    estimate_total_speedup,
    estimate_work_ratio,
    measure_steadiness,
)
from pytest_emad.statistics.units import ByPair
from pytest_emad.statistics.verdicts import Leg
from tests.claims.simulation import asked
from tests.laws.timing_noise import (
    LEVEL,
    SHAPES,
    autoregressive,
    independent,
    interrupted,
    rates,
    seconds,
    shared_drift,
    slow_at_times,
)

MOST = 0.06  # of false verdicts, in either direction
DRAWS, MEASURED = 50, 1000
CHANCE = int(binom.ppf(0.999, DRAWS, MOST))
TRACES = Path(__file__).with_name("timed_against_itself.npz")  # int32 microseconds [2, pairs] of one arm against itself


@pytest.mark.parametrize("name", SHAPES)
def test_few_draws_show_no_grossly_false_rate(name):
    above, below, _ = rates(SHAPES[name], 60, DRAWS, told="processes" in name)
    assert max(above, below) * DRAWS <= CHANCE


@pytest.mark.slow  # a quarter of an hour of simulated races: `tox -e rates`
@pytest.mark.parametrize("pairs", [30, 120])
@pytest.mark.parametrize("name", SHAPES)
def test_at_the_threshold_no_verdict_is_false_more_often_than_it_may(name, pairs):
    """Of 1,000 draws, two standard errors above 6 %."""
    for told in (False, True):
        above, below, covered = rates(SHAPES[name], pairs, MEASURED, told=told)
        assert max(above, below) <= MOST + 2 * binom.std(MEASURED, MOST) / MEASURED
        assert covered >= 0.92


@pytest.mark.parametrize(("pairs", "least"), [(30, 0.8), (60, 0.9), (120, 0.95)])
def test_twice_the_threshold_s_gain_is_shown_where_noise_is_ordinary(pairs, least):
    shown, _, _ = rates(independent, pairs, 100, ratio=1.2, threshold=1.1)
    assert shown >= least


def test_a_paired_t_test_of_the_same_draws_errs_far_more_often():
    """The reason for blocks and for the allowance."""
    for shape in (autoregressive(0.8), shared_drift(0.03)):
        found = [estimate_work_ratio(a, b) for a, b in seconds(shape, 120, 100)]
        assert np.mean([min(each.p_above, each.p_below) <= LEVEL for each in found]) > 0.3


# ------------------------------------------------------------ words of the reason


def legs(race: tuple[ByPair, ByPair]) -> tuple[Leg, ...]:
    """Return the legs of EMAD-F2 on one race."""
    baseline, point = race
    found = SpeedupEvidence({1: TimedBatch(point, {"full depth": baseline})})
    return decide_speedup(found, asked("EMAD-F2", np.random.default_rng(0))).legs


@pytest.mark.parametrize("shape", [autoregressive(0.8), shared_drift(0.03)])
def test_an_unsteady_machine_is_named_where_it_leaves_a_leg_open(shape):
    said = [legs(race)[0] for race in seconds(shape, 60, 20, ratio=1.1)]
    left = [leg for leg in said if leg.outcome == "inconclusive"]
    assert len(left) >= 17
    named = [leg for leg in left if "unsteady machine: " in leg.reason]
    assert len(named) >= 0.8 * len(left)
    assert all(leg.enough is None and "would decide" not in leg.reason for leg in named)


def test_a_gain_far_beyond_the_spells_is_shown_all_the_same():
    for slower, outcome in ((4.0, "survived"), (0.25, "falsified")):
        assert [legs(race)[0].outcome for race in seconds(autoregressive(0.8), 60, 10, ratio=slower)] == [outcome] * 10


def test_a_steady_machine_is_seldom_called_unsteady():
    """5 % for each of three tests."""
    named = [bool(estimate_total_speedup(*race).unsteady) for race in seconds(independent, 60, 200)]
    assert np.mean(named) <= 0.15


def test_the_number_of_pairs_that_would_decide_grows_with_their_correlation():
    def wanted(shape) -> float:
        found = [legs(race)[0] for race in seconds(shape, 120, 20, ratio=1.12)]
        return float(np.median([leg.enough or np.inf for leg in found if leg.outcome == "inconclusive"]))

    assert wanted(independent) < wanted(autoregressive(0.3))


def test_too_few_pairs_name_how_many_are_needed():
    (leg,) = legs(seconds(autoregressive(0.8), 29, 1)[0])
    assert leg.reason == "29 pairs, at least 30 are needed"


def test_what_is_measured_of_correlated_pairs_is_their_correlation():
    a, b = (column.values for column in seconds(autoregressive(0.5), 2000, 1)[0])
    found = measure_steadiness(a, b)
    assert found.lag_one == pytest.approx(0.5, abs=0.06)
    assert found.independent_pair_count == pytest.approx(2000 / 3, rel=0.2)
    assert found.variance_inflation >= measure_steadiness(a[:2], b[:2]).variance_inflation - 2


def test_one_ratio_per_pair_pays_for_correlation_as_totals_do():
    found = [estimate_speedup_per_request(a, b) for a, b in seconds(autoregressive(0.8), 60, 100)]
    assert sum(each.p_above <= LEVEL for each in found) <= 12
    assert sum(each.p_below <= LEVEL for each in found) <= 12
    assert any(each.unsteady for each in found)


# ------------------------------------------------------------ interruptions


def test_interruptions_that_strike_either_arm_are_set_aside_and_told():
    found = [estimate_total_speedup(a, b, threshold=1.1) for a, b in seconds(interrupted(0.05), 120, 100, ratio=1.2)]
    assert sum(each.p_above <= LEVEL for each in found) >= 60, "by a paired t test 13"
    aside = [each for each in found if "set aside as interrupted" in each.note]
    assert len(aside) >= 40
    assert all(each.value == pytest.approx(1.2, rel=0.05) for each in aside)
    told = [legs(race)[0].reason for race in seconds(interrupted(0.05), 120, 20, ratio=1.2)]
    assert sum("pairs lie far from the others" in reason for reason in told) >= 18


def test_an_arm_that_is_slow_at_times_is_not_flattered():
    """1.5 × as fast on nineteen of twenty requests and ten times slower on the other: 1.03 × in total."""
    found = [estimate_total_speedup(a, b, threshold=1.1) for a, b in seconds(slow_at_times(0.05, 1.5), 120, 100)]
    assert sum(each.p_above <= LEVEL for each in found) <= 6
    counted = [each for each in found if "the candidate is slow at times, and they count" in each.note]
    assert len(counted) >= 60
    assert not any("set aside" in each.note for each in found)


def mirrored(found: Estimate, back: Estimate) -> bool:
    return found.p_above == pytest.approx(back.p_below) and found.value == pytest.approx(1 / back.value)


def test_exchanging_arms_exchanges_the_verdict():
    for shape in (interrupted(0.1), slow_at_times(0.05, 1.5), shared_drift(0.03)):
        for a, b in seconds(shape, 60, 10):
            assert mirrored(
                estimate_total_speedup(a, b, threshold=1.1), estimate_total_speedup(b, a, threshold=1 / 1.1)
            )


# ------------------------------------------------------------ recorded races


@pytest.mark.parametrize("pairs", [30, 60, 120])
def test_recorded_races_of_an_arm_beside_itself_decide_nothing(pairs):
    """The reference decoder with both bundled models at full depth, while eight programs keep two cores busy."""
    found = []
    with np.load(TRACES) as traces:
        for first, second in traces.values():
            for start in range(0, len(first) - pairs + 1, pairs):
                found.append(
                    estimate_total_speedup(*(ByPair(arm[start : start + pairs] / 1e6) for arm in (first, second)))
                )
    assert len(found) * pairs >= 9000
    for side in ("p_above", "p_below"):
        assert sum(getattr(each, side) <= LEVEL for each in found) <= MOST * len(found)
    assert sum(each.low <= 1 <= each.high for each in found) >= 0.95 * len(found)
