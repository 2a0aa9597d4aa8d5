"""Holm's correction: the textbook example and its invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_emad.statistics.estimate import holm_adjusted_pvalues

p_values = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_holm_on_the_textbook_example():
    assert holm_adjusted_pvalues([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(p_values)
def test_holm_only_raises_keeps_order_and_stays_below_bonferroni(p):
    adjusted = np.array(holm_adjusted_pvalues(p))
    assert (adjusted >= p).all()
    assert (adjusted <= np.minimum(1, len(p) * np.array(p))).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()


@given(p_values, p_values)
def test_unknown_p_values_are_treated_no_better_than_any_known_ones(mine, others):
    assert (
        np.array(holm_adjusted_pvalues(mine, others=len(others)))
        >= np.array(holm_adjusted_pvalues(mine + others))[: len(mine)]
    ).all()
