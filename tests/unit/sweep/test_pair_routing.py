"""EAD's thresholds by quantile, the front of the tried rules, and the mixture with a given share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from pytest_emad.sweep.front import (
    RoutedTaskItems,
    RoutingShareAndScore,
    mix_runs_to_large_share,
    routing_front_indices,
    switching_thresholds,
)

# ---------------------------------------------------------------- thresholds


@given(st.lists(st.integers(0, 40).map(lambda eighths: eighths / 8), min_size=1, max_size=60), st.integers(1, 20))
def test_no_threshold_lies_on_a_value_that_occurs(values, count):
    tau = switching_thresholds(np.array(values), count)
    assert len(tau) <= count
    assert all(a < b for a, b in pairwise(tau))
    assert not set(tau) & set(values)
    assert bool(tau) == (len(set(values)) > 1), "no threshold divides a single value"


def test_thresholds_leave_even_shares_above():
    rolling = np.random.default_rng(0).permutation(np.arange(1000.0))
    shares = [(rolling >= tau).mean() for tau in switching_thresholds(rolling, 9)]
    assert shares == pytest.approx(np.arange(9, 0, -1) / 10, abs=0.002)


# ---------------------------------------------------------------- the front


routings = st.builds(
    RoutingShareAndScore, st.integers(0, 8).map(lambda n: n / 8), st.integers(0, 8).map(lambda n: n / 8)
)


def reached(first, second, share):
    p = (share - second.large_share) / (first.large_share - second.large_share)
    return p * first.score + (1 - p) * second.score


@given(st.lists(routings, min_size=1, max_size=12))
def test_nothing_tried_lies_above_the_front(tried):
    rows = [tried[index] for index in routing_front_indices(tried)]
    shares = [row.large_share for row in rows]
    assert shares == sorted(set(shares), reverse=True)
    assert {shares[0], shares[-1]} == {max(r.large_share for r in tried), min(r.large_share for r in tried)}
    for row in tried:
        if row.large_share in shares:
            assert row.score <= rows[shares.index(row.large_share)].score
            continue
        ((first, second),) = [(a, b) for a, b in pairwise(rows) if a.large_share > row.large_share > b.large_share]
        assert row.score <= reached(first, second, row.large_share) + 1e-12  # float64 arithmetic


def test_a_rule_below_the_line_is_no_corner():
    tried = [
        RoutingShareAndScore(0.0, 0.5),
        RoutingShareAndScore(1.0, 0.9),
        RoutingShareAndScore(0.5, 0.6),
        RoutingShareAndScore(0.25, 0.75),
    ]
    assert routing_front_indices(tried) == [1, 3, 0]


# ---------------------------------------------------------------- mixtures


def ran(rng, items, accuracy, share):
    emitted = rng.integers(20, 60, items)
    return RoutedTaskItems((rng.random(items) < accuracy).astype(float), emitted, rng.binomial(emitted, share))


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95))
def test_a_mixture_has_exactly_the_share_and_the_score_of_its_parts(seed, share):
    rng = np.random.default_rng(seed)
    runs = [ran(rng, 40, accuracy, large) for accuracy, large in ((0.9, 1.0), (0.8, 0.5), (0.6, 0.0))]
    found = mix_runs_to_large_share(runs, share, rng)
    first, second, p = runs[found.first], runs[found.second], found.probability
    assert found.second == found.first + 1
    assert 0 <= p <= 1
    by_large = p * first.by_large.sum() + (1 - p) * second.by_large.sum()
    assert by_large / (p * first.emitted.sum() + (1 - p) * second.emitted.sum()) == pytest.approx(share, abs=1e-12)
    assert found.score.mean() == pytest.approx(p * first.right.mean() + (1 - p) * second.right.mean(), abs=1e-12)


def test_the_scores_spread_holds_that_of_the_proportion():
    """Compared with the spread of the score over a thousand sets of items; uncorrected it is a tenth too small."""
    rng, scores, errors, plain = np.random.default_rng(5), [], [], []
    for _ in range(1000):
        hard = rng.random(100)
        emitted = rng.integers(30, 90, 100)
        right = [(rng.random(100) < accuracy - 0.6 * hard).astype(float) for accuracy in (1.2, 0.9)]
        large = [rng.binomial(emitted, share + 0.5 * (hard - 0.5)) for share in (0.65, 0.35)]
        runs = [RoutedTaskItems(r, emitted, by) for r, by in zip(right, large, strict=True)]
        found = mix_runs_to_large_share(runs, 0.5, rng)
        scores.append(found.score.mean())
        errors.append(found.score.std(ddof=1) / 10)
        p = found.probability
        plain.append((p * right[0] + (1 - p) * right[1]).std(ddof=1) / 10)
    # the standard deviation of 1,000 draws is known to 1 / √2000 = 2.2 %
    assert np.mean(errors) == pytest.approx(np.std(scores), rel=0.07)
    assert abs(np.mean(plain) / np.std(scores) - 1) > 0.1


def test_items_are_dealt_so_that_the_share_is_met_within_one_item():
    rng = np.random.default_rng(4)
    emitted = rng.integers(20, 60, 50)
    # ``right`` encodes the rule that answered: 2 the first, 3 the second
    runs = [RoutedTaskItems(np.full(50, 2.0 + n), emitted, rng.binomial(emitted, 0.7 - 0.5 * n)) for n in (0, 1)]
    found = mix_runs_to_large_share(runs, 0.45, rng)
    first = found.dealt == 2
    assert set(found.dealt) == {2.0, 3.0}
    by_large = np.where(first, runs[0].by_large, runs[1].by_large).sum()
    assert by_large == pytest.approx(0.45 * emitted.sum(), abs=60)
    assert first.mean() == pytest.approx(found.probability, abs=0.1)


def test_a_run_that_has_the_share_itself_is_taken_alone():
    whole, half, none = (RoutedTaskItems(np.ones(2), np.array([4, 4]), np.array([n, n])) for n in (4, 2, 0))
    found = mix_runs_to_large_share([whole, half, none], 0.5, np.random.default_rng(0))
    assert (found.second, found.probability) == (1, 0.0)


def test_of_several_neighbours_those_nearest_to_validations_are_taken():
    """On the judged items, shares need not fall from rule to rule."""
    runs = [RoutedTaskItems(np.ones(1), np.array([10]), np.array([n])) for n in (9, 3, 7, 0)]
    assert [mix_runs_to_large_share(runs, 0.5, np.random.default_rng(0), near=near).first for near in (0, 2)] == [0, 2]


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_share_outside_is_refused(share):
    runs = [RoutedTaskItems(np.ones(1), np.array([10]), np.array([n])) for n in (8, 2)]
    with pytest.raises(BadArgument, match="a share between those of the runs"):
        mix_runs_to_large_share(runs, share, np.random.default_rng(0))
