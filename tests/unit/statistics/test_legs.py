"""Legs of a verdict: estimates against a threshold, identities, legs that only report, and the rule that joins them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import (
    LegTest,
    build_measured_count_leg,
    build_measured_estimate_leg,
    decide_legs,
    judge_against_threshold,
    not_applicable_verdict,
    outcome_and_deciding_leg,
    unmeasured_verdict,
    verdict_from_legs,
)
from pytest_emad.statistics.rates import mean_rate
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import OUTCOMES, Leg, load_register

REGISTER = load_register()
CLAIM = replace(REGISTER["EMAD-E9"], minimum={"documents": 30})


def estimate(value: float, p_above: float, p_below: float, n: int = 40, noun: str = "documents") -> Estimate:
    return Estimate(value, value - 0.1, value + 0.1, n, p_above, p_below, "nats", "by hand", noun)


ABOVE, BELOW, OPEN = estimate(0.5, 0.01, 1.0), estimate(-0.5, 1.0, 0.01), estimate(0.02, 0.4, 0.6)


def judged(legs, bad="above", **kwargs):
    return judge_against_threshold(CLAIM, "m", legs, bad, 0.0, **kwargs)


# --- the leg rule -------------------------------------------------------------------------------------------------


def leg(outcome: str, name: str = "a", p: float | None = None) -> Leg:
    return Leg(name, outcome, 0.0, None, 50, 0.01, "", p_falsify=p, p_survive=p)


@given(st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=6))
def test_falsified_if_a_leg_is_survived_only_if_all_are(kinds):
    row, _ = outcome_and_deciding_leg([leg(kind) for kind in kinds])
    part = [kind for kind in kinds if kind not in ("measured", "not applicable")]
    if "falsified" in part:
        assert row == "falsified"
    elif part and set(part) == {"survived"}:
        assert row == "survived"
    elif part:
        assert row == ("unmeasured" if set(part) == {"unmeasured"} else "inconclusive")
    else:
        assert row == ("not applicable" if "not applicable" in kinds else "measured")


def test_the_deciding_leg_is_the_surest_of_the_falsified_and_the_least_sure_of_the_survivors():
    assert (
        outcome_and_deciding_leg(
            [leg("falsified", "a", 0.04), leg("falsified", "b", 0.001), leg("survived", "c", 0.0)]
        )[1].name
        == "b"
    )
    assert outcome_and_deciding_leg([leg("survived", "a", 0.001), leg("survived", "b", 0.04)])[1].name == "b"
    assert (
        outcome_and_deciding_leg(
            [leg("survived", "a", 0.9), leg("inconclusive", "b", 0.2), leg("inconclusive", "c", 0.3)]
        )[1].name
        == "c"
    )


def test_the_headline_is_the_model_under_test_where_it_decided_alike():
    own, others = [leg("falsified", "own", 0.04), leg("survived", "own too", 0.01)], [leg("falsified", "b", 0.001)]
    verdict = verdict_from_legs(CLAIM, "m", [*own, *others], headline=own)
    assert (verdict.verdict, verdict.reason) == ("falsified", "2 of 3 legs falsified; worst leg: own")
    alone = verdict_from_legs(CLAIM, "m", [*own[1:], *others], headline=own[1:])
    assert alone.reason == "1 of 2 legs falsified; worst leg: b"


def test_a_verdict_knows_its_deciding_leg_among_legs_with_equal_numbers():
    legs = [leg("survived", "a", 0.01), leg("survived", "b", 0.02), leg("survived", "c", 0.001)]
    verdict = verdict_from_legs(CLAIM, "m", legs)
    assert (verdict.deciding, verdict.legs[1].name) == (1, "b")
    assert not_applicable_verdict(CLAIM, "m", "no clock", legs).deciding is None
    assert not_applicable_verdict(CLAIM, "m", "no clock", legs).legs == tuple(legs)


def test_a_verdict_that_lists_only_the_worst_legs_lists_the_one_that_decided():
    legs = [leg("survived", name, p) for name, p in (("a", 0.001), ("b", 0.02), ("c", 0.04), ("d", 0.003))]
    verdict = verdict_from_legs(CLAIM, "m", legs, listed=2, notes=["", "and more"])
    assert [each.name for each in verdict.legs] == ["a", "c"]
    assert verdict.legs[verdict.deciding].name == "c"
    assert verdict.n == 4
    assert verdict.reason.endswith("leg nearest to the threshold: c; the worst 2 of 4 legs are listed; and more")
    assert len(verdict_from_legs(CLAIM, "m", legs, listed=4).legs) == 4
    assert "listed" not in verdict_from_legs(CLAIM, "m", legs, listed=4).reason


def test_a_test_says_beforehand_what_makes_its_leg_fail_or_keeps_it_open():
    def decided(p_falsify, p_survive, **said):
        tested = Leg("a", "inconclusive", 0.0, (-1.0, 1.0), 50, 0.01, "", p_falsify=p_falsify, p_survive=p_survive)
        (found,) = decide_legs([LegTest(tested, "documents", lambda error: None, **said)])
        return found.outcome, found.reason

    assert decided(0.9, 0.01, cannot_survive="saves too little") == ("inconclusive", "saves too little")
    assert decided(0.01, 0.9, cannot_survive="saves too little") == ("falsified", "")
    assert decided(0.2, 0.9, surely_fails="slower") == ("falsified", "slower")
    assert decided(0.01, 0.9, surely_fails="slower") == ("falsified", "")
    assert decided(0.9, 0.01, surely_fails="slower") == ("survived", "")


def test_no_legs_are_refused():
    with pytest.raises(BadArgument, match="legs"):
        outcome_and_deciding_leg([])


def test_absent_premises_and_instruments_are_values_with_reasons():
    for make, outcome in ((not_applicable_verdict, "not applicable"), (unmeasured_verdict, "unmeasured")):
        verdict = make(CLAIM, "m", "no clock")
        assert (verdict.verdict, verdict.estimate, verdict.reason) == (outcome, None, "no clock")


# --- estimates on one side ----------------------------------------------------------------------------------------


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


def test_the_minimum_is_that_of_the_unit_that_was_resampled():
    """Items are not documents: a minimum of 30 documents does not apply to 29 items."""
    assert judged({"a": replace(ABOVE, n=29, noun="items")}).verdict == "falsified"
    assert judged({"a": replace(ABOVE, n=29)}).verdict == "inconclusive"


def test_what_falsifies_shares_the_level_with_other_legs_and_with_the_run():
    """p = 0.02 falsifies alone and in a family of two, but not with two other legs, here or elsewhere."""
    leg = estimate(0.5, 0.02, 1.0)
    assert judged({"a": leg}).verdict == "falsified"
    assert judged({"a": leg}, other_legs=1).verdict == "falsified"
    assert judged({"a": leg}, other_legs=2).verdict == "inconclusive"
    crowded = judged({"a": leg, "b": OPEN, "c": OPEN})
    assert crowded.verdict == "inconclusive"
    assert "falsified alone, but not after Holm over 3 legs" in crowded.legs[0].reason


def test_what_survives_does_so_at_its_own_level_beside_any_number_of_legs():
    """All legs must hold (an intersection–union test), so a correction would only cost power."""
    leg = estimate(-0.5, 1.0, 0.049)
    assert judged({"a": leg, "b": leg, "c": leg}, other_legs=10**6).verdict == "survived"
    assert judged({"a": leg, "b": estimate(-0.5, 1.0, 0.051)}).verdict == "inconclusive"


DEMANDING = replace(CLAIM, minimum={"documents": 30, "documents_to_survive": 200})


@pytest.mark.parametrize(
    ("leg", "n", "outcome", "said"),
    [
        (BELOW, 29, "inconclusive", "29 documents, at least 30 are needed"),
        (
            BELOW,
            30,
            "inconclusive",
            "30 documents, at least 200 are needed to survive: 30 documents cannot exclude that 10 % of",
        ),
        (BELOW, 200, "survived", "200 documents cannot exclude that 1.5 % of them fail"),
        (BELOW, 2000, "survived", "2000 documents cannot exclude that 0.15 % of them fail"),
        (ABOVE, 30, "falsified", ""),
        (
            estimate(-0.5, 0.9, 0.0501),
            30,
            "inconclusive",
            "about 200 documents would decide it in four of five samples if the estimate is true "
            "(200 to any number at the ends of its interval)",
        ),
        (replace(BELOW, noun="items"), 30, "survived", ""),
    ],
)
def test_a_row_may_ask_for_more_before_a_leg_survives(leg, n, outcome, said):
    (found,) = judge_against_threshold(DEMANDING, "m", {"a": replace(leg, n=n)}, "above", 0.0).legs
    assert found.outcome == outcome
    assert said in found.reason
    assert bool(said) == bool(found.reason)


def test_a_tie_is_inconclusive_and_says_so_whatever_its_interval():
    tied = replace(estimate(0.0, 1.0, 1.0), method="tied: only 3 of 40 documents differ")
    for low, high in ((-0.1, 0.1), (-math.inf, math.inf)):
        (found,) = judged({"a": replace(tied, low=low, high=high)}).legs
        assert (found.outcome, found.reason) == ("inconclusive", "tied: only 3 of 40 documents differ")


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (("survived", "unmeasured"), "1 of 2 legs unmeasured"),
        (("survived", "inconclusive", "unmeasured"), "1 of 3 legs inconclusive"),
        (("inconclusive", "inconclusive"), "both legs inconclusive"),
        (("falsified", "survived", "inconclusive"), "1 of 3 legs falsified"),
        (("survived", "survived", "measured"), "both legs survived"),
    ],
)
def test_a_reason_counts_the_outcome_at_hand_and_never_none_of_it(kinds, count):
    legs = [leg(kind, name, 0.5) for kind, name in zip(kinds, "abc", strict=False)]
    assert verdict_from_legs(CLAIM, "m", legs).reason.startswith(f"{count}; ")


@pytest.mark.parametrize(
    ("found", "why", "enough"),
    [
        ({"a": replace(ABOVE, n=29)}, "29 documents, at least 30 are needed", 30),
        ({"a": BELOW, "b": replace(ABOVE, n=1)}, "1 document, at least 30 are needed", 30),
        ({"a": replace(BELOW, n=30)}, "30 documents, at least 200 are needed to survive", 200),
        (
            {"a": replace(estimate(-0.5, 0.9, 0.0501), n=30)},
            "about 200 documents would decide it in four of five samples",
            200,
        ),
        ({"a": estimate(0.0, 0.5, 0.5)}, "too near the threshold for any number of documents", None),
        ({"a": replace(estimate(0.0, 1.0, 1.0), method="tied")}, "tied", None),
        ({"a": replace(BELOW, n=300), "b": replace(estimate(0.0, 1.0, 1.0), method="tied")}, "b (tied)", None),
        ({"a": ABOVE}, "", None),
        ({"a": replace(BELOW, n=300)}, "", None),
    ],
)
def test_what_would_decide_an_open_row_is_data_and_in_the_words_of_its_reason(found, why, enough):
    row = judge_against_threshold(DEMANDING, "m", found, "above", 0.0)
    assert (row.why, row.enough) == (why, enough)
    assert why in row.reason


def test_what_is_absent_says_so_as_the_reason_that_a_row_is_open():
    for verdict in (not_applicable_verdict(CLAIM, "m", "no clock"), unmeasured_verdict(CLAIM, "m", "no clock")):
        assert (verdict.why, verdict.enough) == ("no clock", None)


def test_legs_that_report_are_listed_and_take_no_part():
    beside = [
        build_measured_estimate_leg("beside", ABOVE),
        build_measured_count_leg("count", 0.2, 7, "net FLOP reduction"),
    ]
    row = judged({"a": BELOW}, beside=beside)
    assert row.verdict == "survived"
    assert [leg.name for leg in row.legs] == ["a", "beside", "count"]


def test_without_legs_a_row_is_measured_where_something_reports_and_else_unmeasured():
    assert judged({}, beside=[build_measured_count_leg("count", 0.2, 7, "x")]).verdict == "measured"
    nothing = judged({})
    assert (nothing.verdict, nothing.estimate, nothing.reason) == ("unmeasured", None, "nothing was compared")


def test_an_estimate_that_reports_keeps_its_interval_and_has_no_threshold():
    leg = build_measured_estimate_leg("a", ABOVE, "ours")
    assert (leg.outcome, leg.estimate, leg.interval, leg.n) == ("measured", 0.5, (0.4, 0.6), 40)
    assert (leg.threshold, leg.unit, leg.reason, leg.p_falsify, leg.p_survive) == (None, "nats", "ours", None, None)


def test_an_interval_without_bounds_is_no_interval():
    column, tokens = ByDocument.from_whole_documents(np.array([1.0])), ByDocument.from_whole_documents(np.array([2]))
    single = mean_rate(column, tokens, threshold=0.0, rng=np.random.default_rng(0), unit="nats")
    assert math.isinf(single.high)
    assert build_measured_estimate_leg("a", single).interval is None


def test_a_count_is_a_number_without_interval():
    leg = build_measured_count_leg("a", np.float32(0.25), 12, "net FLOP reduction", "arithmetic")
    assert (leg.outcome, leg.estimate, leg.interval, leg.n) == ("measured", 0.25, None, 12)
    assert type(leg.estimate) is float  # JSON knows no NumPy scalars
    assert (leg.unit, leg.reason) == ("net FLOP reduction", "arithmetic")


# --- identities ---------------------------------------------------------------------------------------------------
