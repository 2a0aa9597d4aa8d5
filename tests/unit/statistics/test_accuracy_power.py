"""Detectable drops and forecasts of items: what is promised for four of five samples holds in simulated ones."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.statistics.accuracy import accuracy_drop_pvalues
from pytest_emad.statistics.accuracy_power import ScoreSpread, find_detectable_drops, forecast_items
from pytest_emad.statistics.estimate import Estimate

MARGIN, LEVEL, DRAWS = 0.01, 0.05, 2_000
# Whole items: of 300 some 15 differ, and the exact tail rounds fractional counts towards no decision.
LEAST, MOST = 0.77, 0.88


def share_decided(n: int, noise: float, drop: float, side: int) -> float:
    """Share of samples whose p-value on ``side`` (0: above, 1: below the margin) decides."""
    rng = np.random.default_rng(0)
    lost, gained = noise / 2 + max(drop, 0.0), noise / 2 + max(-drop, 0.0)
    shares = [lost, gained, 1 - lost - gained]
    tables, counts = np.unique(rng.multinomial(n, shares, size=DRAWS)[:, :2], axis=0, return_counts=True)
    p = [accuracy_drop_pvalues(lost / n, gained / n, n, threshold=MARGIN)[side] for lost, gained in tables]
    return float(counts[np.asarray(p) <= LEVEL].sum() / DRAWS)


@pytest.mark.parametrize(("n", "noise"), [(300, 0.05), (1319, 0.02), (1319, 0.1), (14042, 0.05)])
def test_four_of_five_samples_decide_the_detectable_drops(n: int, noise: float) -> None:
    found = find_detectable_drops(ScoreSpread(noise, n, exact=True), MARGIN, LEVEL, LEVEL)
    assert found.falsified is not None
    assert found.survived is not None
    assert LEAST <= share_decided(n, noise, found.falsified, 0) <= MOST
    assert LEAST <= share_decided(n, noise, found.survived, 1) <= MOST


@pytest.mark.parametrize(("drop", "side"), [(0.0, 1), (0.025, 0)])
def test_four_of_five_samples_of_the_forecast_size_decide(drop: float, side: int) -> None:
    estimate = Estimate(drop, drop - 0.01, drop + 0.012, 400, 0.3, 0.3, "accuracy drop", "", "items")
    forecast = forecast_items(ScoreSpread(0.06, 400, exact=True), estimate, MARGIN, LEVEL, LEVEL, 400)
    assert forecast.items is not None
    assert LEAST <= share_decided(forecast.items, 0.06, drop, side) <= MOST
    assert forecast.fewest is not None
    assert forecast.fewest < forecast.items
    assert forecast.most is None or forecast.most > forecast.items


def test_scores_in_between_take_the_normal_distribution() -> None:
    exact, between = (
        find_detectable_drops(ScoreSpread(0.05, 14_042, exact=kind), MARGIN, LEVEL, LEVEL) for kind in (True, False)
    )
    assert between.falsified == pytest.approx(exact.falsified, abs=1e-3)
    assert between.survived == pytest.approx(exact.survived, abs=1e-3)


def test_a_drop_at_the_margin_has_no_forecast() -> None:
    estimate = Estimate(MARGIN, 0.0, 0.02, 400, 0.5, 0.5, "accuracy drop", "", "items")
    forecast = forecast_items(ScoreSpread(0.06, 400, exact=True), estimate, MARGIN, LEVEL, LEVEL, 400)
    assert forecast.items is None
    assert str(forecast) == "the estimate is too near the margin for any number of items"


def test_clustered_items_need_as_many_more() -> None:
    estimate = Estimate(0.0, -0.02, 0.02, 100, 0.5, 0.5, "accuracy drop", "", "items")
    alone = forecast_items(ScoreSpread(0.06, 400, exact=True), estimate, MARGIN, LEVEL, LEVEL, 400)
    clustered = forecast_items(ScoreSpread(0.06, 100, exact=True), estimate, MARGIN, LEVEL, LEVEL, 400)
    assert alone.items is not None
    assert clustered.items == pytest.approx(4 * alone.items, rel=0.02)


def test_too_few_items_let_nothing_survive() -> None:
    found = find_detectable_drops(ScoreSpread(0.0, 20, exact=False), MARGIN, LEVEL, LEVEL)
    assert found.survived is None
