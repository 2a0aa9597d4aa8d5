"""The trend over flatness: steeper profiles that gain more give ρ = 1, an order like any other a large p."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.measurements.pareto import MarginGain, ProfileFlatness, flatness_trend, margin_gain, profile_flatness
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.rates import profile_slope
from emad_ref.sweep.grids import EMAD_FAMILY
from tests.small_evidence import small_evidence


def dot(slope: float, gain: float) -> ProfileFlatness:
    estimate = Estimate(slope, slope, slope, 30, 0.0, 0.0, "nats per layer", "", "documents")
    return ProfileFlatness("model", "corpus", estimate, "m=0.00", gain)


def test_steeper_profiles_that_gain_more_rise_together() -> None:
    rho, p = flatness_trend([dot(-0.1 * n, 0.05 * n) for n in range(1, 7)])
    assert rho == pytest.approx(1.0)
    assert p == pytest.approx(2 / math.factorial(6))  # the one order and its reverse, of 720


def test_flatter_profiles_that_gain_more_contradict_the_paper() -> None:
    assert flatness_trend([dot(-0.1 * n, -0.05 * n) for n in range(1, 6)])[0] == pytest.approx(-1.0)


def test_equal_gains_have_no_order() -> None:
    rho, p = flatness_trend([dot(-0.1 * n, 0.0) for n in range(1, 7)])
    assert math.isnan(rho)
    assert p == 1.0


def test_three_profiles_are_no_trend() -> None:
    with pytest.raises(BadArgument, match="at least 4"):
        flatness_trend([dot(-0.1, 0.1), dot(-0.2, 0.2), dot(-0.3, 0.3)])


def margins(*rows: tuple[str, float, float, float]) -> SimpleNamespace:
    """Points whose margins have (name, mean depth, rise, net reduction) on validation; a tenth is lost on evaluation.

    Full depth's perplexity is 4.
    """
    sweep = [
        SimpleNamespace(
            point=SimpleNamespace(name=name), mean_depth=depth, perplexity=4 * (1 + rise), perplexity_rise=rise,
            net_reduction=saved,
        )
        for name, depth, rise, saved in rows
    ]  # fmt: skip
    saved = {id(row.point): row.net_reduction for row in sweep}
    return SimpleNamespace(
        validated=lambda family: {EMAD_FAMILY: sweep}[family],
        validated_full=SimpleNamespace(perplexity=4.0),
        evaluated=lambda point: SimpleNamespace(net_reduction=saved[id(point)] - 0.1, perplexity_rise=0.5),
    )


def test_the_gain_is_what_the_cheapest_margin_within_bounds_on_validation_saves_on_evaluation() -> None:
    deep, right, shallow = ("m=0.9", 5.0, 0.0, 0.1), ("m=0.5", 4.0, 0.005, 0.3), ("m=0.1", 3.0, 0.05, 0.5)
    gained = margin_gain(margins(deep, right, shallow))
    assert (gained.point, gained.saved, gained.rise) == ("m=0.5", pytest.approx(0.2), 0.5)
    assert margin_gain(margins(shallow)) == MarginGain("no margin", 0.0, 0.0)
    assert margin_gain(margins(("m=0.9", 5.0, 0.0, -0.02))) == MarginGain("no margin", 0.0, 0.0), (
        "probes that never fire cost"
    )


def test_a_dot_has_the_slope_of_the_profile_by_document() -> None:
    evidence = small_evidence()
    found, traces = profile_flatness(evidence.traces, evidence.rivals, np.random.default_rng(3)), evidence.traces
    expected = profile_slope(traces.entropy_sums, traces.lengths, threshold=0.0, rng=np.random.default_rng(3))
    assert found.slope == expected
    assert (found.model, found.corpus) == ("small", "self")
    gained = margin_gain(evidence.rivals)
    assert (found.point, found.gain) == (gained.point, gained.saved)
