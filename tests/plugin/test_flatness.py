"""The trend over flatness: steeper profiles that gain more give ρ = 1, an order like any other a large p."""

from __future__ import annotations

import math

import pytest

from emad_ref.errors import BadArgument
from emad_ref.verdict.interval import Estimate
from pytest_emad.flatness import Flatness, trend


def dot(slope: float, gain: float) -> Flatness:
    estimate = Estimate(slope, slope, slope, 30, 0.0, 0.0, "nats per layer", "")
    return Flatness("model", "corpus", estimate, gain, "m=0.00", 30)


def test_steeper_profiles_that_gain_more_rise_together() -> None:
    rho, p = trend([dot(-0.1 * n, 0.05 * n) for n in range(1, 7)])
    assert rho == pytest.approx(1.0)
    assert p == pytest.approx(2 / math.factorial(6))  # the one order and its reverse, of 720


def test_flatter_profiles_that_gain_more_contradict_the_paper() -> None:
    assert trend([dot(-0.1 * n, -0.05 * n) for n in range(1, 6)])[0] == pytest.approx(-1.0)


def test_equal_gains_have_no_order() -> None:
    rho, p = trend([dot(-0.1 * n, 0.0) for n in range(1, 7)])
    assert math.isnan(rho)
    assert p == 1.0


def test_three_profiles_are_no_trend() -> None:
    with pytest.raises(BadArgument, match="at least 4"):
        trend([dot(-0.1, 0.1), dot(-0.2, 0.2), dot(-0.3, 0.3)])
