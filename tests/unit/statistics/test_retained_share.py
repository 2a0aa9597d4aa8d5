"""The retained share of a score: a ratio over paired items, tested against a threshold."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from emad_ref.errors import BadArgument
from pytest_emad.statistics.accuracy import estimate_retained_share
from pytest_emad.statistics.units import ByItem, ByPair
from tests.claims.simulation import clustered


def test_retained_score_is_a_ratio_of_two_uncertain_scores() -> None:
    reference = np.arange(200) % 2 == 0
    candidate = ByItem.from_independent_items(reference & (np.arange(200) % 8 != 0))  # keeps 3 of 4
    found = estimate_retained_share(candidate, ByItem.from_independent_items(reference), 0.9)
    assert found.value == 0.75
    assert found.low < 0.7 < 0.8 < found.high < 0.9
    assert found.p_below < 0.05 < found.p_above
    assert (found.n, found.noun) == (200, "items")
    kept = estimate_retained_share(candidate, ByItem.from_independent_items(reference), 0.6)
    assert kept.p_above < 0.05 < kept.p_below


def test_the_same_answers_keep_all_of_the_score_but_not_surely() -> None:
    """100 right answers, none of 200 items lost: 3 in 200 may still be, which is 3 % of the score."""
    reference = ByItem.from_independent_items(np.arange(200) % 2 == 0)
    found = estimate_retained_share(reference, reference, 0.97)
    assert found.value == 1.0
    assert found.low == pytest.approx(1 - 2 * (1 - 0.025 ** (1 / 200)), abs=1e-5)
    assert found.high > 1.03
    assert found.p_above == pytest.approx(0.985**200)
    assert estimate_retained_share(reference, reference, 1.0).p_above == 1.0


@pytest.mark.parametrize("items", [100, 300])
@pytest.mark.parametrize("icc", [0.0, 0.3])
def test_a_share_kept_errs_as_often_as_it_says(items: int, icc: float) -> None:
    """96.7 % of 70 % right answers are kept: 150 simulations, 5 % plus three standard errors; clusters of four."""
    above = below = 0
    for seed in range(150):
        source = np.random.default_rng([seed, items])
        levels = [norm.cdf(clustered(source, items, 4, icc)[0]) for _ in range(2)]
        cluster = np.repeat(np.arange(items), 4)
        right = levels[0] < 0.7
        kept = right & (levels[1] >= 0.1) | ~right & (levels[1] < (0.967 - 0.9) * 0.7 / 0.3)
        found = estimate_retained_share(ByItem(kept, cluster), ByItem(right, cluster), 0.967)
        assert found.n == items
        above, below = above + (found.p_above <= 0.05), below + (found.p_below <= 0.05)
    assert max(above, below) / 150 < 0.105


def test_repeats_of_an_item_narrow_nothing() -> None:
    source = np.random.default_rng(0)
    right, kept = source.random(100) < 0.7, source.random(100) < 0.6
    once = estimate_retained_share(ByItem.from_independent_items(kept), ByItem.from_independent_items(right), 0.9)
    cluster = np.repeat(np.arange(100), 4)
    repeated = estimate_retained_share(ByItem(np.repeat(kept, 4), cluster), ByItem(np.repeat(right, 4), cluster), 0.9)
    assert (repeated.n, repeated.value) == (100, once.value)
    assert repeated.low == pytest.approx(once.low, abs=0.02)
    assert repeated.high == pytest.approx(once.high, abs=0.02)


@pytest.mark.parametrize(
    ("candidate", "reference", "named"),
    [
        (
            ByItem.from_independent_items(np.ones(3, dtype=bool)),
            ByItem.from_independent_items(np.zeros(3, dtype=bool)),
            "no item right",
        ),
        (
            ByItem.from_independent_items(np.ones(3, dtype=bool)),
            ByItem.from_independent_items(np.ones(4, dtype=bool)),
            r"shape \(3,\)",
        ),
        (
            ByItem.from_independent_items(np.ones(1, dtype=bool)),
            ByItem.from_independent_items(np.ones(4, dtype=bool)),
            r"shape \(1,\)",
        ),
        (ByItem.from_independent_items(np.ones(3, dtype=bool)), ByPair(np.ones(3, dtype=bool)), "ByItem"),
    ],
)
def test_a_share_of_no_score_or_of_other_items_is_no_number(candidate, reference, named) -> None:
    with pytest.raises(BadArgument, match=named):
        estimate_retained_share(candidate, reference, 0.9)


@pytest.mark.parametrize("kept", [0.0, 2.0, -1.0])
def test_no_share_can_be_kept_but_one_of_the_score(kept: float) -> None:
    right = ByItem.from_independent_items(np.ones(3, dtype=bool))
    with pytest.raises(BadArgument, match=r"^target_share="):
        estimate_retained_share(right, right, kept)
