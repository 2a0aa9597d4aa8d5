"""Estimates over items answered twice: scores, exit blocks, and guarantees over calibration sets."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from pytest_emad.statistics.accuracy import estimate_paired_exit_depth_difference, estimate_score_difference
from pytest_emad.statistics.rates import FEWEST_DIFFERING
from pytest_emad.statistics.units import ByDocument, ByItem


def test_no_differing_item_is_not_certainty() -> None:
    """If 100 items agree, 3 % of all items may still differ (the rule of three)."""
    same = np.full(100, 0.5)
    found = estimate_score_difference(
        ByItem.from_independent_items(same),
        ByItem.from_independent_items(same),
        threshold=0.0,
        rng=np.random.default_rng(0),
        unit="score",
    )
    assert found.value == 0
    assert 0.03 < found.high < 0.06
    assert found.p_above > 0.05


@pytest.mark.parametrize("sign", [1, -1])
def test_one_differing_item_decides_nothing(sign: int) -> None:
    """The bootstrap of one item in a hundred would be certain of its sign, or bound it by millions."""
    a, b = np.full(100, 0.5), np.full(100, 0.5)
    a[3] += 0.4 * sign
    found = estimate_score_difference(
        ByItem.from_independent_items(a),
        ByItem.from_independent_items(b),
        threshold=0.0,
        rng=np.random.default_rng(0),
        unit="score",
    )
    assert found.value == pytest.approx(0.004 * sign)
    assert -0.08 < found.low < -0.03
    assert 0.03 < found.high < 0.08
    assert min(found.p_above, found.p_below) > 0.05


def test_many_differing_items_decide() -> None:
    rng = np.random.default_rng(0)
    b = rng.uniform(0, 0.5, 100)
    found = estimate_score_difference(
        ByItem.from_independent_items(b + rng.uniform(0, 0.2, 100)),
        ByItem.from_independent_items(b),
        threshold=0.02,
        rng=rng,
        unit="score",
    )
    assert found.low < found.value < found.high < 0.15
    assert found.p_above < 0.001


def test_earlier_is_in_blocks_and_positive_for_the_earlier_side() -> None:
    rng = np.random.default_rng(0)
    depths = rng.integers(3, 7, size=100).astype(float)
    late = depths + rng.integers(0, 3, 100)
    found = estimate_paired_exit_depth_difference(
        ByItem.from_independent_items(depths), ByItem.from_independent_items(late), layers=8, threshold=0.0, rng=rng
    )
    assert found.value == pytest.approx((late - depths).mean())
    assert found.low < found.value < found.high
    assert found.p_above < 0.01


@pytest.mark.parametrize(("differing", "counts"), [(FEWEST_DIFFERING - 1, True), (FEWEST_DIFFERING, False)])
def test_few_differing_items_are_counted_and_more_are_resampled(differing: int, counts: bool) -> None:
    a, b = np.full(100, 0.5), np.full(100, 0.5)
    a[:differing] += np.linspace(0.1, 0.4, differing)
    found = estimate_score_difference(
        ByItem.from_independent_items(a),
        ByItem.from_independent_items(b),
        threshold=0.0,
        rng=np.random.default_rng(0),
        unit="score",
    )
    assert ("exact bounds" in found.method) is counts
    assert ("bootstrap" in found.method) is not counts
    assert (found.n, found.noun) == (100, "items")


def test_both_sides_answer_the_same_items() -> None:
    with pytest.raises(BadArgument, match="the same items"):
        estimate_score_difference(
            ByItem.from_independent_items(np.zeros(3)),
            ByItem.from_independent_items(np.zeros(4)),
            threshold=0.0,
            rng=np.random.default_rng(0),
            unit="score",
        )
    documents = ByDocument.from_whole_documents(np.zeros(3))
    with pytest.raises(BadArgument, match="ByItem"):
        estimate_score_difference(documents, documents, threshold=0.0, rng=np.random.default_rng(0), unit="score")
