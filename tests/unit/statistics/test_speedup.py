"""Speedup as a ratio of times: closed forms, and error rates by simulation."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from emad_ref.errors import BadArgument
from pytest_emad.statistics.speedup import (
    estimate_ratio_with_meter_error,
    estimate_speedup_per_request,
    estimate_total_speedup,
    estimate_work_ratio,
    measure_steadiness,
)
from pytest_emad.statistics.units import ByPair


def test_speedup_is_the_geometric_mean_of_the_pairs():
    a, b = np.array([2.0, 4.0, 9.0]), np.array([1.0, 4.0, 3.0])
    speed = estimate_speedup_per_request(ByPair(a), ByPair(b), threshold=1.1)
    assert speed.value == pytest.approx(6 ** (1 / 3))
    logs = np.log(a / b)
    inflation = measure_steadiness(a, b).variance_inflation
    half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) * math.sqrt(inflation / 3)
    assert math.log(speed.low) == pytest.approx(logs.mean() - half)
    t = stats.ttest_1samp(logs, math.log(1.1)).statistic / math.sqrt(inflation)
    assert (speed.p_above, speed.p_below) == pytest.approx((stats.t.sf(t, 2), stats.t.cdf(t, 2)))


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=20))
def test_swapping_timing_arms_inverts_the_ratio(pairs):
    a, b = (ByPair(column) for column in np.array(pairs).T)
    there = estimate_speedup_per_request(a, b, threshold=1.1)
    back = estimate_speedup_per_request(b, a, threshold=1 / 1.1)
    assert there.value == pytest.approx(1 / back.value)
    assert there.p_above == pytest.approx(back.p_below, abs=1e-9)


@pytest.mark.parametrize("ratio_of", [estimate_speedup_per_request, estimate_total_speedup])
def test_pairs_without_spread_bound_nothing_and_a_single_pair_shows_nothing(ratio_of):
    same = ratio_of(ByPair(np.full(30, 2.4)), ByPair(np.full(30, 2.0)), threshold=1.1)
    assert (same.value, same.low, same.high) == (pytest.approx(1.2), 0.0, math.inf)
    assert (same.p_above, same.p_below) == (pytest.approx(0.9**30), 1.0)
    tied = ratio_of(ByPair(np.full(30, 2.0)), ByPair(np.full(30, 2.0)), threshold=1.0)
    assert (tied.p_above, tied.p_below) == (1.0, 1.0)
    assert tied.method.startswith("tied: the same in each of 30 pairs")
    single = ratio_of(ByPair(np.array([2.0])), ByPair(np.array([1.0])), threshold=1.1)
    assert (single.low, single.high, single.p_above, single.p_below) == (0.0, math.inf, 1.0, 1.0)


NO_TIMES = [
    ([1.0, 0.0], [1, 1], r"^times_a\[1\]=0\.0, but expected a positive, finite number"),
    ([1.0, 1.0], [1, math.nan], r"^times_b\[1\]=nan, .*a clock or counter that stands still"),
    ([-2.0, 1.0], [1, 1], r"^times_a\[0\]=-2"),
    ([math.inf, 1.0], [1, 1], r"^times_a\[0\]=inf"),
    ([1.0], [1, 1], "^times_b="),
]


@pytest.mark.parametrize("ratio_of", [estimate_speedup_per_request, estimate_total_speedup, estimate_work_ratio])
@pytest.mark.parametrize(("a", "b", "said"), NO_TIMES)
def test_times_that_are_no_pairs_of_times_are_refused_in_words_of_times(ratio_of, a, b, said):
    with pytest.raises(BadArgument, match=said) as refused:
        ratio_of(ByPair(np.array(a)), ByPair(np.array(b)))
    assert "document" not in str(refused.value)


def requests(n: int, ratio: float, seed: int, spread: float = 1.0, noise: float = 0.1) -> tuple[ByPair, ByPair]:
    """Return times of requests of very different length; ``ratio`` is that of their expected totals."""
    source = np.random.default_rng([seed, n])
    length = np.exp(spread * source.standard_normal(n))
    a, b = (length * np.exp(noise * source.standard_normal(n)) for _ in range(2))
    return ByPair(ratio * a), ByPair(b)


def test_the_total_ratio_weighs_requests_by_what_they_take():
    a, b = ByPair(np.array([2.0, 4.0, 90.0])), ByPair(np.array([1.0, 4.0, 30.0]))
    found = estimate_total_speedup(a, b, threshold=1.1)
    assert found.value == 96 / 35
    assert estimate_speedup_per_request(a, b).value == pytest.approx(6 ** (1 / 3))
    t = stats.ttest_1samp(a.values - 1.1 * b.values, 0).statistic / math.sqrt(
        measure_steadiness(a.values, b.values).variance_inflation
    )
    assert found.p_above == pytest.approx(stats.t.sf(t, 2))
    assert (found.n, found.noun, found.unit) == (3, "pairs", "× as fast in total")


@given(seed=st.integers(0, 1000), threshold=st.floats(0.8, 1.3))
def test_bounds_and_p_values_of_the_total_ratio_tell_the_same_story(seed, threshold):
    a, b = requests(12, 1.05, seed)
    found = estimate_total_speedup(a, b, threshold=threshold, level=0.90)
    assert (found.p_above <= 0.05) == (found.low > threshold)
    assert (found.p_below <= 0.05) == (found.high < threshold)
    back = estimate_total_speedup(b, a, threshold=1 / threshold, level=0.90)
    assert back.value == pytest.approx(1 / found.value)
    assert back.p_below == pytest.approx(found.p_above)


def test_a_total_that_a_single_request_makes_up_has_no_upper_bound():
    """One request of a thousand seconds and two of milliseconds: the total time of such a mix is unknown."""
    found = estimate_total_speedup(ByPair(np.array([1000.0, 0.001, 0.002])), ByPair(np.array([900.0, 0.001, 0.001])))
    assert (found.low, found.high) == (0.0, math.inf)
    single = estimate_total_speedup(ByPair(np.array([2.0])), ByPair(np.array([1.0])), threshold=1.1)
    assert (single.low, single.high, single.p_above, single.p_below) == (0.0, math.inf, 1.0, 1.0)


@pytest.mark.parametrize("n", [30, 60, 200])
def test_counted_work_errs_as_often_as_it_says_and_times_less_often(n):
    """Lengths over three orders of magnitude, truth on the threshold; 300 simulations, 5 % plus three errors."""
    errors = Counter()
    for seed in range(300):
        for ratio_of in (estimate_work_ratio, estimate_total_speedup):
            found = ratio_of(*requests(n, 1.1, seed), threshold=1.1)
            errors[ratio_of, "above"] += found.p_above <= 0.05
            errors[ratio_of, "below"] += found.p_below <= 0.05
    assert all(4 < errors[estimate_work_ratio, side] < 27 for side in ("above", "below"))
    assert all(errors[estimate_total_speedup, side] <= 15 for side in ("above", "below"))


# ------------------------------------------------------------ in several processes


def in_processes(values: np.ndarray, processes: int) -> ByPair:
    return ByPair(values, np.repeat(np.arange(processes), len(values) // processes))


def test_the_unit_is_the_process_where_pairs_of_one_agree_and_processes_differ():
    """Four processes with ratios 1.1, 1.0, 1.3, 1.2 in every pair: 40 pairs are not 40 independent ratios."""
    ratios = np.repeat([1.1, 1.0, 1.3, 1.2], 10)
    noise = np.exp(0.001 * np.random.default_rng(0).standard_normal(40))
    found = estimate_total_speedup(in_processes(ratios * noise, 4), in_processes(np.ones(40), 4))
    alone = estimate_total_speedup(ByPair(ratios * noise), ByPair(np.ones(40)))
    assert found.value == alone.value
    assert found.n == 40
    totals = (ratios * noise).reshape(4, 10).mean(1)
    inflation = measure_steadiness(ratios * noise, np.ones(40)).variance_inflation
    low, high = stats.t.interval(0.95, 3, totals.mean(), stats.sem(totals) * math.sqrt(inflation))
    assert (found.low, found.high) == pytest.approx((max(0.0, low), high))
    assert found.low < alone.low < alone.high < found.high
    assert found.p_above > alone.p_above
    assert "blocks of time and 4 processes" in found.method


def test_processes_that_agree_by_chance_make_nothing_surer_than_their_pairs():
    a, b = np.tile([0.9, 1.3], 20) * np.exp(0.001 * np.random.default_rng(0).standard_normal(40)), np.ones(40)
    found = estimate_total_speedup(in_processes(a, 4), in_processes(b, 4))
    alone = estimate_total_speedup(ByPair(a), ByPair(b))
    by_process = estimate_total_speedup(ByPair(a.reshape(4, 10).sum(1)), ByPair(b.reshape(4, 10).sum(1)))
    assert alone.low < by_process.low
    assert (found.low, found.high, found.p_above) == (alone.low, alone.high, alone.p_above)


def test_times_of_other_processes_are_no_pairs():
    times = np.arange(1.0, 5.0)
    with pytest.raises(BadArgument, match=r"times_b\.processes=1, but expected 2"):
        estimate_total_speedup(in_processes(times, 2), ByPair(times))
    with pytest.raises(BadArgument, match="names"):
        estimate_total_speedup(in_processes(times, 2), ByPair(times, np.array([0, 1, 0, 1])))
    with pytest.raises(BadArgument, match="take estimate_total_speedup"):
        estimate_speedup_per_request(in_processes(times, 2), in_processes(times, 2))
    with pytest.raises(BadArgument, match="one number per pair"):
        ByPair(times, np.array([0, 1]))


def test_an_instrument_at_its_worst_keeps_the_processes():
    times, off = in_processes(np.array([1.0, 1.1, 2.0, 2.1]), 2), ByPair(np.full(4, 0.01))
    assert "and 2 processes" in estimate_ratio_with_meter_error(times, in_processes(np.ones(4), 2), off, off).method
