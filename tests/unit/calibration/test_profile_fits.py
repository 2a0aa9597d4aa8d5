"""Fits of calibration: the nearest curve that never rises, lines to full entropy, linear probes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import Ridge

from emad_ref.calibration.regression import (
    LinearProbeFit,
    RegressionMoments,
    correct_estimator,
    fit_linear_correction,
    fit_ridge,
    isotonic_targets,
)
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator
from tests.small_models import small_model

POOLED = 1e-9  # means of float64 sums in a different order


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
    theirs = IsotonicRegression(increasing=False).fit_transform(range(len(means)), means, sample_weight=weights)
    assert np.abs(targets - theirs).max() < POOLED, "scikit-learn's, which made earlier profiles"


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


TOKENS, WIDTH = 400, 6


@pytest.fixture(scope="module")
def pairs():
    """Return states of unequal scale around a mean, and entropies that are linear in them plus noise."""
    rng = np.random.default_rng(0)
    x = rng.normal(3, 1, (TOKENS, WIDTH)) * [1, 2, 3, 1, 1, 0.5]
    return x, x @ rng.normal(size=WIDTH) + 2 + 0.3 * rng.normal(size=TOKENS)


@pytest.mark.parametrize("penalty", [0.0, 1e-3, 1.0])
def test_ridge_is_scikit_learns(pairs, penalty):
    x, y = pairs
    fitted = Ridge(alpha=penalty * x.var(axis=0).mean() * TOKENS).fit(x, y)
    expected = [*fitted.coef_, fitted.intercept_]
    assert fit_ridge(RegressionMoments.from_pairs(x, y), penalty) == pytest.approx(expected, rel=1e-8)


def test_sums_of_batches_are_the_sums_of_all(pairs):
    """Up to the order of float64 sums."""
    x, y = pairs
    streamed = sum(
        (RegressionMoments.from_pairs(x[i : i + 37], y[i : i + 37]) for i in range(0, TOKENS, 37)),
        RegressionMoments.empty(WIDTH),
    )
    assert streamed.tokens == TOKENS
    assert fit_ridge(streamed) == pytest.approx(fit_ridge(RegressionMoments.from_pairs(x, y)), rel=1e-9)


def test_a_penalty_keeps_the_fit_finite_where_entries_repeat(pairs):
    x, y = pairs
    twice = RegressionMoments.from_pairs(np.concatenate([x, x], axis=1), y)
    with pytest.raises(BadArgument, match=r"penalty=0, but expected a number > 0 where entries of x follow"):
        fit_ridge(twice, penalty=0)
    weights = fit_ridge(twice)
    assert weights[:WIDTH] == pytest.approx(weights[WIDTH:-1], rel=1e-4), "equal entries share the weight"


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((1, 2)), np.ones(1), "tokens=1, but expected at least 2"),
        (np.full((9, 2), 1e3), np.arange(9.0), "x='9 equal values', but expected values that vary"),
    ],
)
def test_too_little_to_fit_is_refused(x, y, message):
    with pytest.raises(BadArgument, match=message):
        fit_ridge(RegressionMoments.from_pairs(x, y))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((3, 2)), np.ones(2), r"\[tokens, width\] and \[tokens\]"),
        (np.ones(3), np.ones(3), r"\[tokens, width\] and \[tokens\]"),
        (np.array([[np.nan], [1.0]]), np.ones(2), "finite numbers"),
        (np.ones((2, 1)), np.array([1.0, np.inf]), "finite numbers"),
    ],
)
def test_what_are_no_pairs_of_numbers_is_refused(x, y, message):
    with pytest.raises(BadArgument, match=message):
        RegressionMoments.from_pairs(x, y)


def test_a_negative_penalty_is_refused(pairs):
    with pytest.raises(BadArgument, match=r"penalty=-1"):
        fit_ridge(RegressionMoments.from_pairs(*pairs), penalty=-1)


def test_a_correction_is_the_least_squares_line(pairs):
    full = pairs[1]
    raw = (full - 3) / 2 + np.random.default_rng(1).normal(size=TOKENS)
    line = stats.linregress(raw, full)
    assert fit_linear_correction(raw, full) == pytest.approx((line.slope, line.intercept), rel=1e-9)


@pytest.mark.parametrize(
    ("raw", "full", "message"),
    [
        ([1.0, 1.0], [1.0, 2.0], "raw='2 times 1', but expected values that vary"),
        ([1.0, 2.0], [3.0, 3.0], "full='2 times 3', but expected values that vary"),
        ([1.0, 2.0], [3.0], "one estimate and one entropy per token"),
        ([1.0, np.nan], [3.0, 4.0], "finite numbers"),
        ([], [], "tokens=0, but expected at least 2"),
    ],
)
def test_degenerate_corrections_are_refused(raw, full, message):
    with pytest.raises(BadArgument, match=message):
        fit_linear_correction(np.array(raw), np.array(full))


def test_each_probe_gets_its_own_line(pairs):
    full = np.stack([pairs[1], pairs[1] ** 2], axis=1)
    corrected = correct_estimator(EntropyEstimator("topk", k=8), (full - [1, 2]) / [0.5, 4], full)
    assert corrected.correction == (pytest.approx((0.5, 1)), pytest.approx((4, 2)))
    assert (corrected.kind, corrected.k) == ("topk", 8)
    with pytest.raises(BadArgument, match=r"two arrays \[tokens, probes\]"):
        correct_estimator(EntropyEstimator("topk", k=8), full[:, :1], full)


def test_linear_probes_take_in_the_normed_states_of_their_layers_only():
    stepper = CausalStepper(small_model("opt_350m"))  # D = 32 states, E = 16 at the head
    probes = LinearProbeFit(stepper, (2, 4))
    generator = torch.Generator().manual_seed(0)
    seen = {}
    with torch.inference_mode():
        for layer in (1, 2, 3, 4) * 3:
            states = torch.randn(50, 32, generator=generator, dtype=torch.float64)
            entropy = stepper.apply_final_norm(states)[:, 0] * layer + 1
            probes(layer, states, entropy)
            seen[layer] = states
    estimator = probes.fit_estimator(penalty=1e-12)
    assert estimator.kind == "linear"
    assert [len(row) for row in estimator.weights] == [17, 17]
    assert estimator.weights[0] == pytest.approx([2, *[0] * 15, 1], abs=1e-6)
    assert estimator.weights[1] == pytest.approx([4, *[0] * 15, 1], abs=1e-6)
    assert [moments.tokens for moments in probes.moments.values()] == [150, 150]
