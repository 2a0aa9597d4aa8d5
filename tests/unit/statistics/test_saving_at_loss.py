"""Savings at a given loss: crossing points of fronts, the loss of mixtures, and the coverage of intervals."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.replay.losses import Losses
from pytest_emad.statistics.fronts import estimate_saving_at_loss, largest_savings_within_loss
from pytest_emad.sweep.front import choose_front
from tests.handmade_losses import handmade_losses


def sheet(losses: list[float], costs: list[float], documents: int = 3) -> Losses:
    """Return equal documents of ten tokens: nats per token, and FLOPs, of full depth and of the later points."""
    each = np.ones((documents, 1))
    return handmade_losses(10 * each * np.array(losses), each * np.array(costs), 10 * each[:, 0])


PLAIN = sheet([1.0, 1.01, 1.05], [100.0, 80.0, 60.0])


@pytest.mark.parametrize(
    ("most", "saving"), [(0.0, 0.0), (0.005, 0.1), (0.01, 0.2), (0.03, 0.3), (0.05, 0.4), (9.0, 0.4)]
)
def test_a_front_is_crossed_between_its_corners(most: float, saving: float) -> None:
    found = estimate_saving_at_loss(PLAIN, most, threshold=0.05, rng=np.random.default_rng(0), resamples=99)
    assert found.value == pytest.approx(saving)
    assert (found.low, found.high) == pytest.approx((saving, saving)), "documents that are alike have no spread"
    assert (found.p_above < 0.05) == (saving > 0.05)
    assert (found.p_below < 0.05) == (saving < 0.05)


def test_the_front_is_that_of_the_split_it_was_chosen_on() -> None:
    """A point that was bad on its own split is no corner, however good it is on the other; a good one stays."""
    judged = sheet([1.0, 1.00, 1.08, 1.04], [100.0, 80.0, 70.0, 50.0])
    chosen = sheet([1.0, 1.90, 1.01, 1.02], [100.0, 80.0, 70.0, 50.0])
    found = estimate_saving_at_loss(
        judged, 0.041, chosen=chosen, threshold=0.0, rng=np.random.default_rng(0), resamples=99
    )
    assert found.value == pytest.approx(0.5)
    strict = estimate_saving_at_loss(
        judged, 0.02, chosen=chosen, threshold=0.0, rng=np.random.default_rng(0), resamples=99
    )
    assert strict.value == pytest.approx(0.3 * 0.02 / 0.08), "the point that saves a fifth for nothing is no corner"
    corners = np.array([[True, False, True, True]])
    within = largest_savings_within_loss(
        corners, np.array([[0, 0.2, 0.3, 0.5]]), np.array([[1.0, 1.0, 1.08, 1.04]]), 0.02
    )
    assert within == pytest.approx(0.3 * 0.02 / 0.08), "before the front leaves the good region, not after"


def test_a_mixture_that_saves_so_much_loses_exactly_that() -> None:
    rng = np.random.default_rng(3)
    cost = np.sort(rng.uniform(20, 100, (40, 12)), axis=1)[:, ::-1]
    loss = 10 + np.cumsum(rng.uniform(-0.1, 0.5, (40, 12)), axis=1)
    judged = handmade_losses(loss, cost, rng.integers(5, 30, 40))
    for most in (0.01, 0.04, 0.08):
        found = estimate_saving_at_loss(judged, most, threshold=0.0, rng=rng, resamples=9)
        mixed = choose_front(judged, judged).mixture_at(found.value)
        lost = (mixed.loss.sum() - loss[:, 0].sum()) / judged.tokens.sum()
        assert lost == pytest.approx(most, abs=1e-12)


def test_what_saves_nothing_and_what_cannot_be_asked() -> None:
    """Probes that cost more than exits save, so full depth is the only corner."""
    dear = estimate_saving_at_loss(
        sheet([1.0, 1.0, 1.1], [100.0, 110.0, 101.0]), 1.0, threshold=0.0, rng=np.random.default_rng(0), resamples=9
    )
    assert dear.value == 0.0
    rng = np.random.default_rng(0)
    with pytest.raises(BadArgument, match=r"nats_per_token=-0\.1"):
        estimate_saving_at_loss(PLAIN, -0.1, threshold=0.0, rng=rng)
    with pytest.raises(BadArgument, match="chosen=2, but expected 3 points"):
        estimate_saving_at_loss(PLAIN, 0.1, chosen=sheet([1.0, 1.1], [9.0, 8.0]), threshold=0.0, rng=rng)
    alone = estimate_saving_at_loss(sheet([1.0, 1.1], [9.0, 8.0], documents=1), 0.1, threshold=0.0, rng=rng)
    assert (alone.low, alone.high) == (-np.inf, np.inf)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """Losses vary by document; on average a share s of blocks costs 0.1·s² nats, so that 0.001 nats buy 10 %."""
    shares, held = np.linspace(0, 0.4, 17), []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(50, 200, 60).astype(float)
        slope = rng.gamma(2.0, 0.05, 60)[:, None]
        loss = tokens[:, None] * (1.0 + slope * shares**2)
        drawn = handmade_losses(loss, tokens[:, None] * (1 - shares), tokens)
        found = estimate_saving_at_loss(drawn, 0.001, threshold=0.0, rng=rng, resamples=199)
        held.append(found.low <= 0.1 <= found.high)
    assert 0.90 <= np.mean(held) <= 0.99
