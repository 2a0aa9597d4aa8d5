"""EAD's threshold from a wanted share, or from a table of runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.sweep.routing import Routing, best_within_share, threshold_for_share


@given(st.lists(st.floats(0, 9), min_size=1, max_size=60), st.floats(0, 1))
def test_the_threshold_is_the_largest_that_leaves_the_share_above(values, share):
    rolling = np.array(values)
    tau = threshold_for_share(rolling, share)
    wanted = math.ceil(round(share * len(values), 9))
    assert (rolling >= tau).sum() >= wanted
    assert (rolling >= math.nextafter(tau, math.inf)).sum() < max(wanted, 1)


@pytest.mark.parametrize(("share", "tau"), [(1.0, 0.0), (0.3, 7.0), (0.31, 6.0), (0.1, 9.0)])
def test_shares_of_ten_values(share, tau):
    assert threshold_for_share(np.arange(10.0)[::-1], share) == tau


def test_share_zero_is_just_above_every_value():
    assert threshold_for_share(np.array([1.0, 2.0]), 0.0) == math.nextafter(2.0, math.inf)


@pytest.mark.parametrize(
    ("values", "share", "message"),
    [
        ([1.0], 1.5, "large_share=1.5, but expected a share in 0–1"),
        ([1.0], math.nan, "large_share=nan"),
        ([], 0.5, "rolling_bits='0 values', but expected at least one, all finite"),
        ([1.0, math.nan], 0.5, "rolling_bits='2 values'"),
    ],
)
def test_what_decides_nothing_is_refused(values, share, message):
    with pytest.raises(BadArgument, match=message):
        threshold_for_share(np.array(values), share)


TABLE = [Routing(3.0, 0.1, 0.60), Routing(2.0, 0.3, 0.74), Routing(1.5, 0.4, 0.71), Routing(0.0, 1.0, 0.80)]


def test_the_best_row_within_the_share_is_chosen():
    assert best_within_share(TABLE, 0.4) is TABLE[1]
    assert best_within_share(TABLE, 0.2) is TABLE[0]
    assert best_within_share(TABLE, 0.05) is None
