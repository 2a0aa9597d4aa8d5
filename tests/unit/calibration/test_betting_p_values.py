"""p-values by betting: the capital by hand, the level over 2,000 draws of the worst case, and the gain in power."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from emad_ref.calibration import learn_then_test
from emad_ref.calibration.learn_then_test import (
    betting_pvalues,
    documents_needed_to_certify,
    hoeffding_bentkus_pvalues,
    simulate_certification_power,
)

M, LEVEL, SETS = 0.05, 0.05, 2000  # δ/B, ε, simulated calibration sets


def test_the_capital_is_the_product_written_out() -> None:
    x, n = np.random.default_rng(0).beta(0.5, 20, 200).tolist(), 200  # the stake is at its maximum, then below it
    capital = highest = 1.0
    total = squares = 0.0
    before, stakes = 0.25, list[float]()
    order = np.random.default_rng(learn_then_test.ORDER_SEED).permutation(n)
    for i, value in enumerate((x[each] for each in order), start=1):
        stakes.append(math.sqrt(2 * math.log(1 / LEVEL) / (n * before)))
        capital *= 1 + min(stakes[-1], 0.75 / (1 - M)) * (M - value)
        highest = max(highest, capital)
        total += value
        squares += (value - (0.5 + total) / (i + 1)) ** 2
        before = (0.25 + squares) / (i + 1)
    assert betting_pvalues(np.array(x)[:, None], M, LEVEL) == pytest.approx([1 / highest], rel=1e-12)
    assert highest > 1
    assert min(stakes) < 0.75 / (1 - M) < max(stakes)


def test_every_threshold_bets_for_itself() -> None:
    x = np.random.default_rng(0).random((50, 3)) * [0.01, 0.1, 0.9]
    assert betting_pvalues(x, M, LEVEL) == pytest.approx(
        [float(betting_pvalues(x[:, [k]], M, LEVEL)[0]) for k in range(3)], rel=1e-12
    )


# Losses with mean exactly M that a test could underestimate: rare strikes, all or nothing, a cap
# that most documents never reach, values that hardly vary.
EDGES = {
    "all or nothing": lambda rng, shape: (rng.random(shape) < M).astype(float),
    "a point": lambda rng, shape: np.full(shape, M),
    "two points close by": lambda rng, shape: M + 0.01 * rng.choice([-1.0, 1.0], shape),
    "half a strike": lambda rng, shape: 0.5 * (rng.random(shape) < 2 * M),
    "a small loss, and now and then the cap": lambda rng, shape: np.where(
        rng.random(shape) < 0.01, 1.0, (M - 0.01) / 0.99
    ),
    "a ramp, heavily clipped": lambda rng, shape: _clipped(rng, shape),
    "beta, variance small": lambda rng, shape: rng.beta(20 * M, 20 * (1 - M), shape),
}


def _clipped(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return min(1, s·Pareto) with s such that its mean is M: E[min(1, s/√U²)] = 2s − s² for tail index 2."""
    scale = 1 - math.sqrt(1 - M)
    return np.minimum(1.0, scale / np.sqrt(rng.random(shape)))


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("n", [60, 300])
def test_at_the_edge_no_more_than_five_in_a_hundred_pass(name: str, n: int) -> None:
    """2,000 calibration sets: a true 5 % stays below 6.3 % in all but one of 200 runs; the seed is fixed."""
    rng = np.random.default_rng([1, n])
    losses = EDGES[name](rng, (n, SETS))
    assert EDGES[name](rng, (200_000,)).mean() == pytest.approx(M, abs=0.003)  # the mean is exactly M
    assert (betting_pvalues(losses, M, LEVEL) <= LEVEL).mean() <= 0.063


@pytest.mark.parametrize("n", [60, 300])
def test_documents_that_depend_on_those_before_them_break_nothing_as_long_as_their_mean_does_not_fall(n: int) -> None:
    """Ville's inequality requires every document's mean given the past; here strikes are of unequal size."""
    rng = np.random.default_rng(2)
    size = rng.choice([0.2, 1.0], (1, SETS))
    losses = size * (rng.random((n, SETS)) < M / size)
    assert (betting_pvalues(losses, M, LEVEL) <= LEVEL).mean() <= 0.063


def test_documents_in_an_order_of_their_own_certify_no_more_than_shuffled_ones() -> None:
    """Those without loss first: bet on as they come, all 200 sets on the tolerance would be certified."""
    sets = np.sort(EDGES["half a strike"](np.random.default_rng(4), (300, 200)), axis=0)
    assert (betting_pvalues(sets, M, LEVEL) <= LEVEL).mean() <= 0.06
    back = np.argsort(np.random.default_rng(learn_then_test.ORDER_SEED).permutation(300))  # undoes the permutation
    lucky = sets[:, sets.mean(axis=0) <= M][back]
    assert (betting_pvalues(lucky, M, LEVEL) <= LEVEL).mean() > 0.9, "the check above can fail"


def test_a_threshold_whose_mean_loss_exceeds_the_tolerance_is_not_certified() -> None:
    """180 documents without loss before 120 that lose: the capital was enough on the way."""
    order = np.random.default_rng(learn_then_test.ORDER_SEED).permutation(300)
    losses = np.zeros((300, 2))
    losses[order[180:]] = [0.12, 0.126]  # in the order of the bets; means 0.048 and 0.0504
    found = betting_pvalues(losses, M, LEVEL)
    assert found[0] <= LEVEL
    assert found[1] == 1


def test_a_mean_loss_taken_at_its_word_is_caught() -> None:
    """The check above can fail: R̂ ≤ m itself passes in half of all sets."""
    losses = EDGES["half a strike"](np.random.default_rng(0), (300, SETS))
    assert (losses.mean(axis=0) <= M).mean() > 0.4


@pytest.mark.parametrize(("mean", "spread"), [(0.025, 0.02), (0.035, 0.01)])
def test_where_losses_vary_little_it_takes_a_fraction_of_hoeffding_bentkus_documents(mean, spread) -> None:
    rng = np.random.default_rng(3)
    shape = mean * (mean * (1 - mean) / spread**2 - 1), (1 - mean) * (mean * (1 - mean) / spread**2 - 1)
    mine, theirs = (
        next(n for n in range(40, 6000, 20) if passing(rule, rng.beta(*shape, (n, 200))) >= 0.8)
        for rule in (betting_passes, hoeffding_bentkus_passes)
    )
    assert mine < 0.6 * theirs


def passing(rule, losses) -> float:
    return float(rule(losses).mean())


def betting_passes(losses) -> np.ndarray:
    return betting_pvalues(losses, M, LEVEL) <= LEVEL


def hoeffding_bentkus_passes(losses) -> np.ndarray:
    return hoeffding_bentkus_pvalues(losses.sum(axis=0), len(losses), M) <= LEVEL


def test_documents_needed_are_those_that_the_test_needs() -> None:
    rng = np.random.default_rng(4)
    seen = rng.beta(1.0, 39.0, (400, 1))  # mean 0.025
    needed = documents_needed_to_certify(seen, M, LEVEL)
    assert needed is not None
    fresh = rng.choice(seen[:, 0], (needed, SETS))  # the population that the estimate assumes
    assert (betting_pvalues(fresh, M, LEVEL) <= LEVEL).mean() == pytest.approx(0.8, abs=0.06)  # 400 draws against 2,000
    assert (
        simulate_certification_power(seen, 2 * needed, M, LEVEL)
        > 0.95
        > 0.5
        > simulate_certification_power(seen, needed // 2, M, LEVEL)
    )


def test_without_loss_79_documents_do_where_59_are_the_fewest_of_any_test() -> None:
    tolerance = math.log(1.01) / 0.2
    assert documents_needed_to_certify(np.zeros((5, 1)), tolerance, LEVEL) in (79, 80)  # to within 2 %
    assert (
        betting_pvalues(np.zeros((78, 1)), tolerance, LEVEL)
        > LEVEL
        >= betting_pvalues(np.zeros((79, 1)), tolerance, LEVEL)
    )


@pytest.mark.parametrize("least", range(7, 70))
def test_any_number_of_documents_is_found_to_within_2_per_cent(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    asked: list[int] = []

    def power(losses: np.ndarray, documents: int, *_: float, **__: int) -> float:
        asked.append(documents)
        assert len(asked) < 30, f"asked again and again about {documents} documents"
        return float(documents >= least)

    monkeypatch.setattr(learn_then_test, "simulate_certification_power", power)
    found = documents_needed_to_certify(np.zeros((5, 1)), 0.4, LEVEL)
    assert found is not None
    assert least <= found <= 1.02 * least + 1


def test_a_loss_at_the_tolerance_is_never_certified() -> None:
    assert documents_needed_to_certify(np.full((50, 1), M), M, LEVEL) is None
    assert documents_needed_to_certify(np.full((50, 1), M * 0.999), M, LEVEL) is None  # nor within reach


def test_what_comes_before_has_to_pass_too() -> None:
    seen = np.stack([np.full(200, 0.04), np.zeros(200)], axis=1)
    alone, behind = (
        simulate_certification_power(seen[:, 1:], 100, M, LEVEL),
        simulate_certification_power(seen, 100, M, LEVEL),
    )
    assert (alone, behind) == (1.0, 0.0)


def test_more_documents_say_more() -> None:
    seen = np.random.default_rng(5).beta(1.0, 39.0, (300, 1))
    powers = [simulate_certification_power(seen, n, M, LEVEL) for n in (60, 120, 240)]
    assert all(less <= more for less, more in pairwise(powers))
