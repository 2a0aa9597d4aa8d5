"""Selection of a margin: the least depth within both bounds, or None."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emad_ref.point import truncated
from emad_ref.replay.losses import PointLoss, best_at_equal_flops, cheapest_within_bounds, is_within_bounds


def row(perplexity, reference, depth=6.0, saved=0.2, accuracy=0.5):
    rise = perplexity / reference - 1
    return PointLoss(
        truncated(12, 6), depth, depth, depth, {6: 1.0}, saved, saved, np.zeros(1), perplexity, rise, accuracy
    )


@pytest.mark.parametrize(
    ("reference", "perplexity", "admissible"),
    [
        (20.0, 20.0, True),
        (20.0, 20.09, True),
        (20.0, 20.11, False),  # the paper's 0.1 points bind
        (1.4, 1.41, True),
        (1.4, 1.42, False),  # 0.1 points would let 7 % pass; 1 % does not
        (20.0, 19.0, True),
        (20.0, math.nan, False),
        (20.0, math.inf, False),
    ],
)
def test_both_bounds_bind(reference, perplexity, admissible):
    assert is_within_bounds(row(perplexity, reference), reference) == admissible


def test_the_least_mean_depth_within_bounds_is_chosen():
    table = [row(20.0, 20.0, 12.0), row(20.05, 20.0, 7.0), row(20.08, 20.0, 8.0), row(25.0, 20.0, 2.0)]
    assert cheapest_within_bounds(table, 20.0) is table[1]


def test_no_row_within_bounds_is_none():
    assert cheapest_within_bounds([row(25.0, 20.0)], 20.0) is None
    assert cheapest_within_bounds([], 20.0) is None


def test_half_a_point_of_accuracy_binds_beside_perplexity():
    table = [row(20.0, 20.0, 12.0), row(20.05, 20.0, 7.0), row(20.05, 20.0, 8.0), row(25.0, 20.0, 2.0)]
    drops = iter([{"a": 0.0051}, {"a": 0.005}])  # read cheapest first, and never for a row that perplexity excludes
    assert cheapest_within_bounds(table, 20.0, lambda point: next(drops)) is table[2]
    assert next(drops, None) is None
    assert cheapest_within_bounds(table, 20.0, lambda point: {"a": math.nan}) is None
    assert cheapest_within_bounds(table, 20.0, lambda point: {}) is table[1], "no task counts: perplexity decides"


def test_one_task_does_not_pay_for_another():
    """A mean over four tasks, three of which gain or stay, would let this one lose a point."""
    table = [row(20.0, 20.0, 12.0), row(20.05, 20.0, 7.0)]
    drops = iter([{"a": 0.01, "b": 0.0, "c": 0.0, "d": -0.01}, dict.fromkeys("abcd", 0.005)])
    assert cheapest_within_bounds(table, 20.0, lambda point: next(drops)) is table[0]


def test_at_equal_flops_the_rival_is_its_best_row_that_saves_at_least_as_much():
    table = [
        row(20.0, 20.0, saved=0.1),
        row(21.0, 20.0, saved=0.2),
        row(20.5, 20.0, saved=0.3),
        row(30.0, 20.0, saved=0.5),
    ]
    assert best_at_equal_flops(table, 0.2) is table[2]
    assert best_at_equal_flops(table, 0.3) is table[2]
    assert best_at_equal_flops(table, 0.31) is table[3]
    assert best_at_equal_flops(table, 0.6) is None
