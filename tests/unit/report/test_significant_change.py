"""Significant changes between two runs: real ones are found, noise is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pytest_emad.report.comparison import BoundedNumber, significant_change_sign


def symmetric(value: float, half: float) -> BoundedNumber:
    return BoundedNumber(value, value - half, value + half)


@pytest.mark.parametrize(("apart", "found"), [(1.42, 1), (1.41, 0), (0.0, 0), (-1.41, 0), (-1.42, -1)])
def test_equal_half_widths_must_be_apart_by_the_root_of_two(apart: float, found: int) -> None:
    """√(1² + 1²) = 1.4142: the intervals overlap there, but the difference is significant."""
    assert significant_change_sign(symmetric(3.0, 1.0), symmetric(3.0 + apart, 1.0)) == found


def test_the_bounds_that_face_each_other_count() -> None:
    """[0, 1] about 0 and [9, 12] about 10: the facing half-widths are 1 and 1; the outer 2 does not count."""
    old = BoundedNumber(0.0, -5.0, 1.0)
    assert significant_change_sign(old, BoundedNumber(1.5, 0.5, 99.0)) == 1
    assert significant_change_sign(old, BoundedNumber(1.4, 0.4, 99.0)) == 0
    assert significant_change_sign(BoundedNumber(1.5, 0.5, 99.0), old) == -1


def test_without_width_every_difference_is_one_and_without_bounds_none() -> None:
    assert significant_change_sign(symmetric(1.0, 0.0), symmetric(1.0, 0.0)) == 0
    assert significant_change_sign(symmetric(1.0, 0.0), symmetric(math.nextafter(1.0, 2.0), 0.0)) == 1
    assert significant_change_sign(symmetric(1.0, 0.0), BoundedNumber(9.0, -math.inf, math.inf)) == 0
    assert significant_change_sign(BoundedNumber(9.0, 8.0, math.inf), BoundedNumber(1.0, 0.0, 2.0)) == -1


def test_an_estimate_outside_its_interval_asks_for_intervals_apart() -> None:
    outside = BoundedNumber(0.99, 0.90, 0.98)
    assert significant_change_sign(outside, BoundedNumber(0.999, 0.97, 1.0)) == 0
    assert significant_change_sign(outside, BoundedNumber(0.999, 0.99, 1.0)) == 1
    assert significant_change_sign(BoundedNumber(0.999, 0.99, 1.0), outside) == -1


def test_of_runs_that_do_not_differ_five_percent_seem_to() -> None:
    """4,000 pairs of exponential means at n = 60 and 200, t intervals: 5 % ± 1.2 % at three standard errors."""
    rng = np.random.default_rng(0)

    def run(n: int) -> BoundedNumber:
        x = rng.exponential(size=n)
        return symmetric(x.mean(), stats.t.ppf(0.975, n - 1) * x.std(ddof=1) / math.sqrt(n))

    pairs = [(run(60), run(200)) for _ in range(4_000)]
    seen = [(old, new) for old, new in pairs if significant_change_sign(old, new)]
    assert 0.038 <= len(seen) / len(pairs) <= 0.065
    assert not any(old.low <= new.value <= old.high or new.low <= old.value <= new.high for old, new in seen)
