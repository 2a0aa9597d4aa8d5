"""Rows made of estimates on one side of one threshold, and legs that only report."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.verdict.claims import load_register
from emad_ref.verdict.interval import Estimate, mean_rate
from emad_ref.verdict.legs import counted, estimated, judge_side

CLAIM = replace(load_register()["EMAD-E9"], minimum={"documents": 30})


def estimate(value: float, p_above: float, p_below: float, n: int = 40) -> Estimate:
    return Estimate(value, value - 0.1, value + 0.1, n, p_above, p_below, "nats", "by hand")


ABOVE, BELOW, OPEN = estimate(0.5, 0.01, 1.0), estimate(-0.5, 1.0, 0.01), estimate(0.02, 0.4, 0.6)


def judged(legs, bad="above", **kwargs):
    return judge_side(CLAIM, "m", legs, bad, 0.0, "documents", **kwargs)


@pytest.mark.parametrize(
    ("leg", "bad", "verdict"),
    [
        (ABOVE, "above", "falsified"),
        (ABOVE, "below", "survived"),
        (BELOW, "above", "survived"),
        (BELOW, "below", "falsified"),
        (OPEN, "above", "inconclusive"),
        (OPEN, "below", "inconclusive"),
    ],
)
def test_the_bad_side_falsifies_and_the_good_one_survives(leg, bad, verdict):
    row = judged({"a": leg}, bad)
    assert row.verdict == verdict
    assert (row.estimate, row.interval, row.n, row.threshold) == (leg.value, (leg.low, leg.high), 40, 0.0)


def test_one_bad_leg_is_enough_and_one_open_leg_is_too_much():
    assert judged({"a": BELOW, "b": ABOVE, "c": OPEN}).verdict == "falsified"
    assert judged({"a": BELOW, "b": OPEN}).verdict == "inconclusive"
    assert judged({"a": BELOW, "b": BELOW}).verdict == "survived"


def test_too_few_documents_decide_nothing_and_say_how_many_would():
    (leg,) = judged({"a": replace(ABOVE, n=29)}).legs
    assert leg.outcome == "inconclusive"
    assert "29 documents, at least 30 are needed" in leg.reason


def test_legs_share_the_level_with_one_another_and_with_the_run():
    """p = 0.02 decides alone and in a family of two; not beside two others, here or elsewhere."""
    leg = estimate(0.5, 0.02, 1.0)
    assert judged({"a": leg}).verdict == "falsified"
    assert judged({"a": leg}, other_legs=1).verdict == "falsified"
    assert judged({"a": leg}, other_legs=2).verdict == "inconclusive"
    assert judged({"a": leg, "b": OPEN, "c": OPEN}).verdict == "inconclusive"


def test_legs_that_report_are_listed_and_take_no_part():
    beside = [estimated("beside", ABOVE), counted("count", 0.2, 7, "net FLOP reduction")]
    row = judged({"a": BELOW}, beside=beside)
    assert row.verdict == "survived"
    assert [leg.name for leg in row.legs] == ["a", "beside", "count"]


def test_without_legs_a_row_is_measured_where_something_reports_and_else_unmeasured():
    assert judged({}, beside=[counted("count", 0.2, 7, "x")]).verdict == "measured"
    nothing = judged({})
    assert (nothing.verdict, nothing.estimate, nothing.reason) == ("unmeasured", None, "nothing was compared")


def test_an_estimate_that_reports_keeps_its_interval_and_has_no_threshold():
    leg = estimated("a", ABOVE, "ours")
    assert (leg.outcome, leg.estimate, leg.interval, leg.n) == ("measured", 0.5, (0.4, 0.6), 40)
    assert (leg.threshold, leg.unit, leg.reason, leg.p_falsify, leg.p_survive) == (None, "nats", "ours", None, None)


def test_an_interval_without_bounds_is_no_interval():
    single = mean_rate(np.array([1.0]), np.array([2]), threshold=0.0, rng=np.random.default_rng(0), unit="nats")
    assert math.isinf(single.high)
    assert estimated("a", single).interval is None


def test_a_count_is_a_number_without_interval():
    leg = counted("a", np.float32(0.25), 12, "net FLOP reduction", "arithmetic")
    assert (leg.outcome, leg.estimate, leg.interval, leg.n) == ("measured", 0.25, None, 12)
    assert type(leg.estimate) is float  # JSON knows no NumPy scalars
    assert (leg.unit, leg.reason) == ("net FLOP reduction", "arithmetic")
