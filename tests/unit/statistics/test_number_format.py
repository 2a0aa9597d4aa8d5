"""Numbers have one format everywhere, and the decision defines the good direction."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from pytest_emad.report.tables import claim_rows, operating_point_rows
from pytest_emad.statistics import number_format
from pytest_emad.statistics.legs import judge_against_threshold, verdict_from_errors_and_tolerance
from pytest_emad.statistics.rates import mean_rate
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Verdict, load_register

REGISTER = load_register()


def test_examples():
    assert doctest.testmod(number_format).failed == 0


def test_every_row_has_plain_words_that_fit_beside_its_verdict():
    wrong = {name: row.plain for name, row in REGISTER.items() if not 5 < len(row.plain) <= 55 or row.plain[-1] == "."}
    assert wrong == {}
    assert len({row.plain for row in REGISTER.values()}) == len(REGISTER)


def test_a_rise_a_saving_and_a_ratio_have_one_form_in_points_and_claims():
    def estimate(value, unit):
        (row,) = claim_rows([Verdict("X", "m", "measured", value, None, 3, None, unit, "").to_json() | {"gate": False}])
        return row["estimate"].text

    (point,) = operating_point_rows(
        [{"name": "p", "net_reduction": 0.4431, "perplexity_rise": 0.00071, "time_ratio": {"1": 0.98}}]
    )
    assert point["rise [95 %]"].text == estimate(0.00071, "relative rise") == "+0.07 %"
    assert point["net"].text.lstrip("-") == estimate(0.4431, "net FLOP reduction") == "44.3 %"
    assert point["speed"].text.endswith(estimate(0.98, "× as fast"))


def test_zero_has_no_sign():
    assert number_format.format_percent(-1e-9) == "+0.00 %"
    assert number_format.format_reduction_as_change(0.0) == "+0.0 %"
    assert number_format.format_value(-0.0, "nats") == "0"


@pytest.mark.parametrize(("bad", "good"), [("above", "lower"), ("below", "higher")])
def test_good_is_the_side_on_which_a_claim_does_not_fail(bad, good):
    rng = np.random.default_rng(0)
    values = ByDocument(rng.normal(1.0, 0.1, size=100), np.arange(100))
    found = mean_rate(values, ByDocument(np.ones(100), np.arange(100)), threshold=0.5, rng=rng, unit="nats")
    verdict = judge_against_threshold(REGISTER["EMAD-E6"], "m", {"x": found}, bad, 0.5)
    assert (verdict.good, verdict.legs[0].good) == (good, good)
    assert verdict.verdict == ("falsified" if good == "lower" else "survived")


def test_of_a_difference_less_is_better():
    verdict = verdict_from_errors_and_tolerance(REGISTER["EMAD-E5"], "m", {"blocks": np.zeros(3)}, 0.0)
    assert verdict.good == "lower"
    assert number_format.format_requirement(verdict.to_json()) == "at most 0"
