"""Isotonic targets: the nearest curve that never rises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.calibration.fit import isotonic_targets
from emad_ref.errors import BadArgument

POOLED = 1e-9  # means of float64 sums in another order


def pooled(means, weights):
    """Pool adjacent violators, written out: a block that rises above its predecessor is averaged with it."""
    blocks = []
    for mean, weight in zip(means, weights, strict=True):
        blocks.append([mean, weight, 1])
        while len(blocks) > 1 and blocks[-1][0] > blocks[-2][0]:
            (m, w, n), (mean_before, weight_before, count) = blocks.pop(), blocks.pop()
            total = w + weight_before
            blocks.append([(m * w + mean_before * weight_before) / total, total, n + count])
    return [mean for mean, _, n in blocks for _ in range(n)]


@given(st.lists(st.tuples(st.floats(0, 8), st.integers(1, 1000)), min_size=1, max_size=10))
def test_targets_are_the_pooled_means_weighted_by_tokens(pairs):
    means, weights = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    targets = isotonic_targets(range(1, len(means) + 1), means, weights)
    assert np.abs(targets - pooled(means, weights)).max() < POOLED
    assert (np.diff(targets) <= POOLED).all()
    assert np.average(targets, weights=weights) == pytest.approx(np.average(means, weights=weights), abs=1e-6)


def test_means_that_fall_already_are_their_own_targets():
    assert isotonic_targets((4, 8, 12), np.array([3.0, 2.0, 0.5]), np.array([1, 9, 2])).tolist() == [3.0, 2.0, 0.5]


def test_a_rise_is_pooled_by_weight():
    assert isotonic_targets((4, 8), np.array([1.0, 2.0]), np.array([3, 1])).tolist() == [1.25, 1.25]


def test_no_probes_have_no_targets():
    assert isotonic_targets((), np.empty(0), np.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    ("means", "tokens", "message"),
    [
        ([1.0], [1, 1], r"mean_nats=\(1,\), but expected one mean and one token count per probe \(2\)"),
        ([1.0, 2.0], [1], "one mean and one token count per probe"),
        ([1.0, np.nan], [1, 1], "finite entropies; take the trace again"),
    ],
)
def test_means_that_do_not_fit_the_probes_are_refused(means, tokens, message):
    with pytest.raises(BadArgument, match=message):
        isotonic_targets((4, 8), np.array(means), np.array(tokens))
