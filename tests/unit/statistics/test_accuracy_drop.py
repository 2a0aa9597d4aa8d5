"""Accuracy drops: p-values and bounds against the published score, error rates by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from emad_ref.errors import BadArgument
from pytest_emad.statistics.accuracy import (
    _discordant_shares,
    _DiscordantShares,
    estimate_accuracy_drop,
    items_needed_to_decide,
)
from pytest_emad.statistics.units import ByItem


def answers(lost: int, gained: int, n: int) -> tuple[ByItem, ByItem]:
    reference, candidate = np.ones(n, bool), np.ones(n, bool)
    candidate[:lost] = False
    reference[lost : lost + gained] = False
    return ByItem.from_independent_items(reference), ByItem.from_independent_items(candidate)


def tango(lost: int, gained: int, n: int, drop: float) -> float:
    """Compute Tango's statistic with the nuisance share that maximises the likelihood, not by its closed form."""

    def minus_log(share: float) -> float:
        shares = np.array([share + drop, share, 1 - 2 * share - drop])
        return -special.xlogy([lost, gained, n - lost - gained], shares).sum()

    low, high = max(0.0, -drop), (1 - drop) / 2
    share = optimize.minimize_scalar(minus_log, bounds=(low, high), method="bounded", options={"xatol": 1e-10}).x
    return (lost - gained - n * drop) / math.sqrt(n * (2 * share + drop * (1 - drop)))


@pytest.mark.parametrize(("lost", "gained", "n"), [(3, 1, 200), (20, 5, 164), (60, 40, 500), (150, 90, 900)])
@pytest.mark.parametrize("drop", [-0.05, 0.01, 0.1])
def test_p_values_are_about_those_of_tangos_score(lost, gained, n, drop):
    """The exact tail is that of the same statistic: with many discordant items the normal one agrees to a point."""
    found = estimate_accuracy_drop(*answers(lost, gained, n), threshold=drop)
    normal = stats.norm.sf(tango(lost, gained, n, drop))
    assert found.p_above == pytest.approx(normal, abs=0.01 if lost > 50 else 0.1)
    assert found.value == pytest.approx((lost - gained) / n)


def test_few_discordant_items_have_the_tail_of_every_table():
    """Five of forty lost, none gained: at a drop of 10 % the likeliest share gained is 0, and the tail binomial."""
    found = estimate_accuracy_drop(*answers(5, 0, 40), threshold=0.1)
    assert found.p_above == pytest.approx(stats.binom.sf(4, 40, 0.1))
    assert found.p_below == pytest.approx(stats.binom.cdf(5, 40, 0.1))


def test_no_discordant_item_leaves_a_finite_bound():
    drop = estimate_accuracy_drop(*answers(0, 0, 100), threshold=0.01)
    assert drop.value == 0
    assert (drop.low, drop.high) == pytest.approx((0.025 ** (1 / 100) - 1, 1 - 0.025 ** (1 / 100)), abs=1e-6)
    assert drop.p_below == pytest.approx(0.99**100)
    tie = estimate_accuracy_drop(*answers(0, 0, 100), threshold=0.0)
    assert (tie.p_above, tie.p_below) == (1.0, 1.0)


@pytest.mark.parametrize("n", [100, 300])
@pytest.mark.parametrize(("drop", "gained"), [(0.01, 0.0), (0.02, 0.005), (0.05, 0.02), (0.0, 0.02), (-0.02, 0.05)])
def test_the_level_holds_for_every_table(n, drop, gained):
    """Sums the probability of all tables that show the wrong side, not simulated. The normal tail errs up to 8.3 %."""
    above = below = covered = 0.0
    for lost, won in np.ndindex(45, 30):
        chance = stats.multinomial.pmf([lost, won, n - lost - won], n, [drop + gained, gained, 1 - drop - 2 * gained])
        if chance < 1e-6:
            continue
        p_above, p_below = _DiscordantShares(lost / n, won / n, n).tails(drop)
        above, below = above + chance * (p_above <= 0.05), below + chance * (p_below <= 0.05)
        covered += chance * (min(p_above, p_below) > 0.025)
    assert max(above, below) <= 0.0505
    assert covered >= 0.94


def test_a_loss_of_three_points_is_found_as_often_as_wald_finds_it():
    """4 % lost and 1 % gained of 800 items, against one point: 84 % either way (400 draws, standard error 2 %)."""
    source, ours, walds = np.random.default_rng(0), 0, 0
    for _ in range(400):
        lost, gained, _ = source.multinomial(800, [0.04, 0.01, 0.95])
        ours += _DiscordantShares(lost / 800, gained / 800, 800).tails(0.01)[0] <= 0.05
        drop = (lost - gained) / 800
        walds += (drop - 0.01) / math.sqrt(((lost + gained) / 800 - drop**2) / 800) > stats.norm.ppf(0.95)
    assert ours >= walds - 8
    assert ours / 400 > 0.8


def clustered_answers(source, clusters, icc, lost, gained, most=9):
    """Return clusters of one to ``most`` items with losses and gains correlated by a normal level."""
    cluster = np.repeat(np.arange(clusters), source.integers(1, most + 1, clusters))
    levels = (
        math.sqrt(icc) * source.standard_normal(clusters)[cluster]
        + math.sqrt(1 - icc) * source.standard_normal(len(cluster))
        for _ in range(2)
    )
    falls, rises = (stats.norm.cdf(level) for level in levels)
    reference = falls < 0.5
    loses = falls < lost
    gains = ~reference & (rises < gained / 0.5)
    return ByItem(reference, cluster), ByItem((reference & ~loses) | gains, cluster)


@pytest.mark.parametrize("clusters", [30, 60, 200])
@pytest.mark.parametrize("icc", [0.0, 0.3])
def test_items_in_clusters_keep_the_level(clusters, icc):
    """300 simulations at a drop of one point, ragged clusters; taken as independent, they err 8 to 11 % at ICC 0.3."""
    above = below = 0
    for seed in range(300):
        source = np.random.default_rng([seed, clusters])
        p_above, p_below = _discordant_shares(*clustered_answers(source, clusters, icc, 0.05, 0.04)).tails(0.01)
        above, below = above + (p_above <= 0.05), below + (p_below <= 0.05)
    assert max(above, below) / 300 < 0.085


def test_repeats_of_an_item_count_once():
    """Every item four times: the design effect is four, and Student's quantile a little larger."""
    once = answers(12, 4, 100)
    fourfold = [ByItem(np.repeat(arm.values, 4), np.repeat(np.arange(100), 4)) for arm in once]
    plain, repeated = estimate_accuracy_drop(*once, threshold=0.01), estimate_accuracy_drop(*fourfold, threshold=0.01)
    assert (plain.n, repeated.n) == (100, 100)
    assert repeated.value == plain.value
    assert repeated.p_above == pytest.approx(plain.p_above, abs=0.01)
    assert "400 items in 100 clusters count as" in repeated.method
    alike = [ByItem(np.ones(400, dtype=bool), np.repeat(np.arange(100), 4))] * 2
    assert estimate_accuracy_drop(*alike, threshold=0.01).p_below == pytest.approx(0.99**100)


@settings(max_examples=40)
@given(lost=st.integers(0, 40), gained=st.integers(0, 40), threshold=st.floats(-0.2, 0.2))
def test_accuracy_p_values_and_bounds_tell_the_same_story(lost, gained, threshold):
    """Except where a table enters or leaves the tail: there the p-value jumps, by less than 1 % here."""
    drop = estimate_accuracy_drop(*answers(lost, gained, 120), threshold=threshold, level=0.90)
    assert drop.low <= drop.value <= drop.high
    if abs(drop.p_above - 0.05) > 0.01:
        assert (drop.p_above <= 0.05) == (drop.low > threshold)
    if abs(drop.p_below - 0.05) > 0.01:
        assert (drop.p_below <= 0.05) == (drop.high < threshold)


@settings(max_examples=40)
@given(lost=st.integers(0, 30), gained=st.integers(0, 30))
def test_swapping_accuracy_arms_flips_the_sign(lost, gained):
    reference, candidate = answers(lost, gained, 90)
    there = estimate_accuracy_drop(reference, candidate, threshold=0.01)
    back = estimate_accuracy_drop(candidate, reference, threshold=-0.01)
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low), abs=1e-4)
    assert (back.p_above, back.p_below) == pytest.approx((there.p_below, there.p_above))


@pytest.mark.parametrize(
    ("arms", "named"),
    [
        (([1, 0], [True, False]), "reference_correct"),
        (([True, False], [1.0, 0.0]), "candidate_correct"),
        (([True], [True, False]), "candidate_correct"),
        ((np.zeros(0, bool), np.zeros(0, bool)), "reference_correct"),
    ],
)
def test_answers_that_are_not_paired_booleans_are_refused(arms, named):
    with pytest.raises(BadArgument, match=f"^{named}="):
        estimate_accuracy_drop(*(ByItem.from_independent_items(np.asarray(arm)) for arm in arms), threshold=0.01)


def test_few_clusters_that_differ_do_not_pass_for_independent_items():
    """One item lost in a hundred paragraphs of four: nothing was observed of joint losses."""
    cluster, kept = np.repeat(np.arange(100), 4), np.ones(400, dtype=bool)
    kept[7] = False
    reference = ByItem(np.ones(400, dtype=bool), cluster)
    drop = estimate_accuracy_drop(reference, reference.with_values(kept), threshold=0.01)
    assert drop.p_below > stats.binom.cdf(0, 100, 0.01) - 1e-6
    alone = ByItem.from_independent_items(reference.values)
    assert estimate_accuracy_drop(alone, alone.with_values(kept), threshold=0.01).p_below == pytest.approx(
        stats.binom.cdf(1, 400, 0.01)
    )


def test_paragraphs_lost_as_a_whole_are_counted_as_whole_paragraphs():
    """Four of 800 paragraphs, each of four questions, are never less than four of 800 items."""
    cluster = np.repeat(np.arange(800), 4)
    reference = ByItem(np.ones(3200, dtype=bool), cluster)
    drop = estimate_accuracy_drop(reference, reference.with_values(cluster >= 4), threshold=0.01)
    assert drop.p_below == pytest.approx(stats.binom.cdf(4, 800, 0.01), rel=0.02)
    assert drop.p_above >= stats.binom.sf(3, 800, 0.01) - 0.01


@pytest.mark.parametrize("lost", [0, 1, 2, 4])
def test_one_or_two_paragraphs_bound_nothing(lost):
    cluster, kept = np.array([0, 0, 1, 1]), np.arange(4) >= lost
    for group in (cluster, np.zeros(4, dtype=np.int64)):
        reference = ByItem(np.ones(4, dtype=bool), group)
        drop = estimate_accuracy_drop(reference, reference.with_values(kept), threshold=0.01)
        assert drop.low < 0.01 < drop.high
        assert min(drop.p_above, drop.p_below) > 0.005


def test_needed_items_are_enough_and_hardly_more():
    """Without discordance 0.99ⁿ reaches 5 % at n = 299 (found to half a per cent)."""
    number = items_needed_to_decide(*answers(0, 0, 100), threshold=0.01, error=0.05)
    assert 299 <= number <= 301
    assert estimate_accuracy_drop(*answers(0, 0, number), threshold=0.01).p_below <= 0.05
    assert estimate_accuracy_drop(*answers(0, 0, 298), threshold=0.01).p_below > 0.05
    alike = [ByItem(np.ones(400, dtype=bool), np.repeat(np.arange(100), 4))] * 2
    assert items_needed_to_decide(*alike, threshold=0.01, error=0.05) == number


def test_no_number_of_items_decides_a_share_on_the_threshold():
    assert items_needed_to_decide(*answers(1, 0, 100), threshold=0.01, error=0.05) is None
