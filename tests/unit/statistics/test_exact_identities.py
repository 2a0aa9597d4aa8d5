"""Exact rows: an identity holds at every checked place, or it is falsified."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from pytest_emad.statistics.legs import verdict_from_errors_and_tolerance
from pytest_emad.statistics.verdicts import load_register

REGISTER = load_register()


@pytest.mark.parametrize("worst", [1e-6, 0.0])
def test_an_identity_survives_up_to_and_including_its_tolerance(worst):
    verdict = verdict_from_errors_and_tolerance(
        REGISTER["EMAD-E2"], "m", {"cached": np.array([0.0, worst])}, tolerance=1e-6
    )
    assert verdict.verdict == "survived"
    assert verdict.estimate == worst
    assert verdict.n == 2
    assert verdict.threshold == 1e-6


@pytest.mark.parametrize("worst", [1.1e-6, math.nan, math.inf])
def test_an_identity_is_falsified_by_one_difference_or_one_nan(worst):
    errors = {"good": np.zeros(5), "bad": np.array([[0.0, worst]])}
    verdict = verdict_from_errors_and_tolerance(REGISTER["EMAD-E2"], "m", errors, tolerance=1e-6)
    assert verdict.verdict == "falsified"
    assert "1 of 2" in verdict.legs[1].reason
    assert {leg.name: leg.outcome for leg in verdict.legs} == {"good": "survived", "bad": "falsified"}


def test_an_identity_nobody_checked_is_unmeasured():
    assert verdict_from_errors_and_tolerance(REGISTER["EMAD-E5"], "m", {}, 0.0).verdict == "unmeasured"
    assert verdict_from_errors_and_tolerance(REGISTER["EMAD-E5"], "m", {"a": np.zeros(0)}, 0.0).verdict == "unmeasured"
    assert (
        verdict_from_errors_and_tolerance(REGISTER["EMAD-E5"], "m", {"a": np.zeros(0), "b": np.zeros(1)}, 0.0).verdict
        == "inconclusive"
    )


@pytest.mark.parametrize(("errors", "tolerance", "named"), [([0.0], -1.0, "tolerance"), ([-1e-9], 0.0, "errors")])
def test_differences_and_tolerances_are_not_negative(errors, tolerance, named):
    with pytest.raises(BadArgument, match=named):
        verdict_from_errors_and_tolerance(REGISTER["EMAD-E5"], "m", {"a": np.array(errors)}, tolerance)
