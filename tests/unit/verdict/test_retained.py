"""The share of a score that is kept: a ratio of paired items, tested against a share."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.verdict.interval import retained
from emad_ref.verdict.units import ByItem, ByPair


def test_retained_score_is_a_ratio_tested_item_by_item() -> None:
    rng = np.random.default_rng(0)
    reference = np.arange(200) % 2 == 0
    candidate = ByItem.distinct(reference & (np.arange(200) % 8 != 0))  # keeps 3 of 4
    found = retained(candidate, ByItem.distinct(reference), 0.9, rng)
    assert found.value == pytest.approx(0.75, abs=1e-12)
    assert found.low < 0.75 < found.high < 0.9
    assert found.p_below < 0.05 < found.p_above
    assert (found.n, found.noun) == (200, "items")
    kept = retained(candidate, ByItem.distinct(reference), 0.6, np.random.default_rng(0))
    assert kept.p_above < 0.05 < kept.p_below
    assert retained(ByItem.distinct(reference), ByItem.distinct(reference), 1.0, rng).value == 1.0


@pytest.mark.parametrize(
    ("candidate", "reference", "named"),
    [
        (ByItem.distinct(np.ones(3, dtype=bool)), ByItem.distinct(np.zeros(3, dtype=bool)), "no item right"),
        (ByItem.distinct(np.ones(3, dtype=bool)), ByItem.distinct(np.ones(4, dtype=bool)), r"shape \(3,\)"),
        (ByItem.distinct(np.ones(1, dtype=bool)), ByItem.distinct(np.ones(4, dtype=bool)), r"shape \(1,\)"),
        (ByItem.distinct(np.ones(3, dtype=bool)), ByPair(np.ones(3, dtype=bool)), "ByItem"),
    ],
)
def test_a_share_of_no_score_or_of_other_items_is_no_number(candidate, reference, named) -> None:
    with pytest.raises(BadArgument, match=named):
        retained(candidate, reference, 0.9, np.random.default_rng(0))
