"""Learn-then-Test: the p-value by hand, the walk along the thresholds, and coverage over repeated calibrations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from emad_ref.calibration.learn_then_test import (
    certify_loosest_threshold,
    hoeffding_bentkus_pvalues,
    min_sequences_to_certify,
    require_textual_consistency_losses,
    select_threshold,
)
from emad_ref.errors import BadArgument

NO_LOSS = np.zeros(1)


def fewest(p_value, tolerance, level):
    """Return the smallest n at which zero loss is certified, by bisection: p falls with n."""
    low, high = 0, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if p_value(NO_LOSS, middle, tolerance)[0] <= level else (middle, high)
    return high


def test_without_loss_one_percent_at_95_percent_takes_299_sequences():
    """The published numbers fix the notation: δ = 1 % is the tolerated risk, ε = 0.05 the test's level."""
    assert fewest(hoeffding_bentkus_pvalues, tolerance=0.01, level=0.05) == 299 == min_sequences_to_certify(0.01, 0.05)
    assert fewest(hoeffding_bentkus_pvalues, tolerance=0.05, level=0.01) == 90  # the letters swapped


@pytest.mark.parametrize("n", [1, 40, 1000])
@pytest.mark.parametrize("mean", [0.0, 0.013, 0.05, 0.099, 0.1, 0.4, 1.0])
def test_the_p_value_is_the_smaller_of_both_bounds_written_out(n, mean):
    tolerance, total = 0.1, mean * n
    a = min(mean, tolerance)
    h1 = (a * math.log(a / tolerance) if a else 0.0) + (1 - a) * math.log((1 - a) / (1 - tolerance))
    bentkus = math.e * stats.binom.cdf(math.ceil(total), n, tolerance)
    expected = min(1.0, math.exp(-n * h1), bentkus)
    # float64: the exponent is of order 1e3 at most, so p is right to about 1e-12 of itself
    assert hoeffding_bentkus_pvalues(np.array([total]), n, tolerance)[0] == pytest.approx(expected, rel=1e-9, abs=0)


def test_each_bound_is_the_smaller_one_somewhere():
    """δ = 10 %, n = 1,000: Bentkus wins near δ, the Chernoff form of Hoeffding far below it."""
    for mean, bentkus_wins in ((0.075, True), (0.0, False)):
        bentkus = math.e * stats.binom.cdf(math.ceil(1000 * mean), 1000, 0.1)
        p = hoeffding_bentkus_pvalues(np.array([1000 * mean]), 1000, 0.1)[0]
        assert (p == pytest.approx(bentkus, rel=1e-9, abs=0)) == bentkus_wins
        assert p <= bentkus * (1 + 1e-9)  # two ways to the same binomial sum


def test_an_empirical_risk_at_or_above_the_tolerance_shows_nothing():
    assert hoeffding_bentkus_pvalues(np.array([10.0, 11.0, 100.0]), 100, 0.1).tolist() == [1.0, 1.0, 1.0]


def columns(n, *shares):
    """Return [n, λ] losses 0 and 1 whose column means are ``shares``."""
    return np.stack([np.arange(n) < round(share * n) for share in shares], axis=1).astype(float)


def test_the_last_passing_threshold_is_returned():
    found = certify_loosest_threshold(columns(1000, 0.0, 0.01, 0.02, 0.2), tolerance=0.05)
    assert (found.index, found.tested) == (2, 4)
    assert found.mean_loss.tolist() == [0.0, 0.01, 0.02, 0.2]
    assert "threshold 4 of 4 fails" in found.reason


def test_a_pass_behind_a_failure_does_not_count():
    found = certify_loosest_threshold(columns(1000, 0.0, 0.2, 0.0), tolerance=0.05)
    assert (found.index, found.tested) == (0, 2)
    assert found.p_values[2] < found.level  # it would have passed


def test_nothing_passing_is_full_depth_and_said():
    losses = columns(1000, 0.05, 0.0)
    found = select_threshold(losses, np.array([10.0, 3.0]), 12, tolerance=0.05)
    assert found.certificate.index is None
    assert (found.mean_depth, found.blocks_saved) == (12.0, 0.0)
    assert found.certificate.reason.startswith("full depth: threshold 1 of 2 fails")
    assert "certify nothing" not in found.certificate.reason  # 1,000 sequences were enough, but the loss was too large


def test_too_few_sequences_are_named():
    found = certify_loosest_threshold(columns(298, 0.0), tolerance=0.01)
    assert found.index is None
    assert "298 sequences certify nothing, 299 without any loss would" in found.reason
    assert certify_loosest_threshold(columns(299, 0.0), tolerance=0.01).index == 0


def test_all_passing_says_that_the_grid_ended():
    found = certify_loosest_threshold(columns(1000, 0.0, 0.01), tolerance=0.05)
    assert (found.index, found.tested) == (1, 2)
    assert "all 2 thresholds pass" in found.reason


def test_the_order_of_sequences_does_not_matter():
    """0.1 is no binary number: sums in different orders differ in the last place, and ⌈Σ⌉ would jump by one."""
    losses = np.repeat([[0.1], [0.7]], [10, 10], axis=0)
    found = {
        certify_loosest_threshold(np.random.default_rng(seed).permutation(losses), tolerance=0.5).p_values.item()
        for seed in range(20)
    }
    assert found == {hoeffding_bentkus_pvalues(np.array([8.0]), 20, 0.5).item()}


def test_blocks_saved_are_those_of_the_chosen_threshold():
    found = select_threshold(columns(1000, 0.0, 0.01, 0.2), np.array([10.0, 7.5, 2.0]), 12, tolerance=0.05)
    assert (found.mean_depth, found.blocks_saved) == (7.5, 4.5)


def test_textual_consistency_is_the_dissimilarity_itself():
    given = np.array([[0.0, 1.0], [0.25, 0.5]])
    assert require_textual_consistency_losses(given).tolist() == given.tolist()


# The guarantee. Losses are independent between thresholds, so that each threshold with a risk above δ can fail
# independently; two lie just above it, where a p-value that promises too much is caught. A sequence loses all or
# nothing: no loss with the same mean varies more.
TRUE_RISK = np.array([0.004, 0.010, 0.020, 0.0505, 0.0520, 0.0900])
DEPTHS = np.array([11.0, 9.0, 7.0, 5.0, 4.0, 2.0])
LAYERS, TOLERANCE, LEVEL, SEQUENCES = 12, 0.05, 0.1, 300


def process(rng):
    return (rng.random((SEQUENCES, len(TRUE_RISK))) < TRUE_RISK).astype(float)


def repeated(p_value=hoeffding_bentkus_pvalues, draw=process, tolerance=TOLERANCE, level=LEVEL):
    """Return the choices of 1,000 calibration sets, each drawn anew."""
    rng = np.random.default_rng(0)
    return [
        select_threshold(losses, DEPTHS[: losses.shape[1]], LAYERS, tolerance=tolerance, level=level, p_value=p_value)
        for losses in (draw(rng) for _ in range(1000))
    ]


def held(chosen, tolerance=TOLERANCE, truth=TRUE_RISK):
    """Return the share of sets whose choice risks at most ``tolerance``; full depth risks nothing."""
    indices = [each.certificate.index for each in chosen]
    return np.mean([index is None or truth[index] <= tolerance for index in indices])


def test_the_promise_holds_over_repeated_calibrations_and_is_worth_something(record_property):
    """P(true risk ≤ δ) ≥ 1 − ε over 1,000 calibration sets, and not by staying at full depth."""
    chosen = repeated()
    saved = np.mean([each.blocks_saved for each in chosen])
    record_property("coverage", float(held(chosen)))
    record_property("blocks_saved", float(saved))
    assert held(chosen) >= 1 - LEVEL
    assert np.mean([each.certificate.index is not None for each in chosen]) >= 0.5
    assert saved > 3.0  # of 12; the loosest admissible threshold saves 5


def test_a_p_value_without_a_margin_breaks_the_promise():
    """The mean loss itself compared with δ: near δ it is below in about half of all draws."""
    assert held(repeated(lambda sums, n, tolerance: (sums / n > tolerance).astype(float))) < 0.8


def rare(rng):
    return (rng.random((SEQUENCES, 1)) < 0.011).astype(float)


def normal(sums, n, tolerance):
    """Return the central limit theorem's p-value for losses 0 and 1."""
    mean = sums / n
    with np.errstate(divide="ignore"):
        return stats.norm.cdf((mean - tolerance) / np.sqrt(mean * (1 - mean) / n))


def test_rare_losses_break_a_normal_p_value_and_not_ours():
    """Risk 1.1 % against δ = 1 %, 300 sequences: about 3 strikes, often 1, with a meaningless sample variance."""
    setting, truth = {"draw": rare, "tolerance": 0.01, "level": 0.05}, {"tolerance": 0.01, "truth": np.array([0.011])}
    assert held(repeated(normal, **setting), **truth) < 0.95
    assert held(repeated(**setting), **truth) >= 0.95


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"losses": np.zeros(5)}, "losses"),
        ({"losses": np.zeros((0, 3))}, "losses"),
        ({"losses": np.zeros((3, 0))}, "losses"),
        ({"losses": np.array([[0.0, 1.01]])}, "losses"),
        ({"losses": np.array([[0.0, -0.1]])}, "losses"),
        ({"losses": np.array([[0.0, math.nan]])}, "losses"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"level": 0.0}, "level"),
        ({"level": math.nan}, "level"),
        ({"mean_depths": np.array([3.0])}, "mean_depths"),
        ({"mean_depths": np.array([3.0, 13.0])}, "mean_depths"),
        ({"mean_depths": np.array([3.0, math.nan])}, "mean_depths"),
    ],
)
def test_misuse_is_refused_by_name(change, named):
    given = {"losses": np.zeros((4, 2)), "mean_depths": np.array([6.0, 3.0]), "layers": 12, "tolerance": 0.1, **change}
    with pytest.raises(BadArgument, match=f"^{named}="):
        select_threshold(**given)
