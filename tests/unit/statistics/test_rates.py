"""Rates: closed forms, agreement with libraries, error rates by simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from emad_ref.errors import BadArgument
from pytest_emad.statistics import rates
from pytest_emad.statistics.estimate import (
    Estimate,
    ThresholdDistance,
    needed_sample_range,
    needed_sample_size,
    pvalue_with_unseen_units,
)
from pytest_emad.statistics.legs import build_leg_test, decide_legs
from pytest_emad.statistics.rates import (
    FEWEST_DIFFERING,
    cap_document_weights,
    draw_document_counts,
    estimate_entropy_changes,
    estimate_entropy_slope,
    estimate_perplexity_rise,
    estimate_ratio_to_sample,
    estimate_saving,
    estimate_within_document_slope,
    mean_rate,
    widen_by_neighbour_blocks,
)
from pytest_emad.statistics.units import ByDocument, ByItem, ByPair, DocumentMembership, effective_sample_size
from tests.handmade_losses import handmade_losses


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def documents(n: int, rate: float, spread: float, seed: int = 1) -> tuple[ByDocument, ByDocument, ByDocument]:
    """Return candidate and reference NLL sums whose difference is ``rate`` nats per token on average."""
    source = np.random.default_rng(seed)
    tokens = source.integers(50, 300, n)
    reference = tokens * source.uniform(1.0, 3.0, n)
    candidate = reference + tokens * (rate + spread * source.standard_normal(n))
    return (
        ByDocument.from_whole_documents(candidate),
        ByDocument.from_whole_documents(reference),
        ByDocument.from_whole_documents(tokens),
    )


def difference(candidate: ByDocument, reference: ByDocument) -> ByDocument:
    return candidate.with_values(candidate.values - reference.values)


def each(*values: float) -> ByDocument:
    """Return one value for each document."""
    return ByDocument.from_whole_documents(np.array(values))


# --- perplexity ---------------------------------------------------------------------------------------------------


def test_the_value_is_the_ratio_of_perplexities():
    candidate, reference, tokens = documents(40, 0.02, 0.01)
    rise = estimate_perplexity_rise(candidate, reference, tokens, threshold=0.01, rng=rng())
    total = tokens.values.sum()
    expected = math.exp(candidate.values.sum() / total) / math.exp(reference.values.sum() / total) - 1
    assert rise.value == pytest.approx(expected, rel=1e-12)
    assert rise.low < rise.value < rise.high
    assert (rise.n, rise.noun) == (effective_sample_size(tokens.values), "documents")
    share = 100 * tokens.values.max() / total
    assert rise.note == f"40 unequal documents count as {rise.n}; the largest has {share:.2g} % of the tokens"


def test_the_interval_agrees_with_scipys_bca_on_well_behaved_documents():
    """Two bootstraps of 200 near-normal documents differ by Monte-Carlo noise: a tenth of the half-width."""
    candidate, reference, tokens = documents(200, 0.02, 0.05)
    ours = mean_rate(difference(candidate, reference), tokens, threshold=0.0, rng=rng(), unit="nats")
    theirs = stats.bootstrap(
        (difference(candidate, reference).values, tokens.values.astype(float)),
        lambda x, n, axis: x.sum(axis) / n.sum(axis),
        paired=True,
        vectorized=True,
        rng=rng(),
        method="BCa",
    ).confidence_interval
    slack = 0.1 * (ours.high - ours.low) / 2
    assert ours.low == pytest.approx(theirs.low, abs=slack)
    assert ours.high == pytest.approx(theirs.high, abs=slack)


RATES = {
    "normal": lambda source, n: source.normal(1, 1, n),
    "exponential": lambda source, n: source.exponential(1, n),
    "fifteen that differ": lambda source, n: 1 + (source.random(n) < 15 / n) * source.standard_normal(n),
}


@pytest.mark.parametrize("n", [30, 60, 200])
@pytest.mark.parametrize("kind", RATES)
def test_one_sided_bounds_err_as_often_as_they_say(kind, n):
    """Truth on the threshold; 300 simulations, the bound is 5 % plus three standard errors."""
    above = below = 0
    for seed in range(300):
        source = np.random.default_rng([seed, n])
        tokens = source.integers(100, 400, n)
        draws = draw_document_counts(n, 399, source)
        columns = (
            ByDocument.from_whole_documents(tokens * (RATES[kind](source, n) - 1)),
            ByDocument.from_whole_documents(tokens),
        )
        estimate = mean_rate(*columns, threshold=0.0, rng=source, unit="nats", draws=draws)
        above, below = above + (estimate.p_above <= 0.05), below + (estimate.p_below <= 0.05)
    assert max(above, below) / 300 < 0.09


@given(seed=st.integers(0, 10_000))
def test_nothing_is_surer_than_students_t(seed):
    """With equal tokens the mean rate is a mean: its interval contains Student's, its p-values are no smaller."""
    values = np.random.default_rng(seed).standard_normal(25)
    draws = draw_document_counts(25, 199, np.random.default_rng(seed))
    columns = ByDocument.from_whole_documents(values), ByDocument.from_whole_documents(np.ones(25))
    found = mean_rate(*columns, threshold=0.1, rng=rng(), unit="nats", draws=draws)
    student = stats.ttest_1samp(values, 0.1, alternative="greater")
    low, high = stats.ttest_1samp(values, 0.1).confidence_interval(0.95)
    assert found.low <= low + 1e-12
    assert found.high >= high - 1e-12
    assert found.p_above >= student.pvalue - 1e-12
    assert found.p_below >= 1 - student.pvalue - 1e-12


@pytest.mark.parametrize("n", [60, 200])
def test_few_documents_that_differ_do_not_falsify_a_tie(n):
    """Two to eight documents differ, in either direction: the bootstrap alone decided 8 to 25 % of such runs."""
    decided = 0
    for seed in range(300):
        source = np.random.default_rng([seed, n])
        sums = np.zeros(n)
        differ = source.choice(n, size=source.integers(2, 9), replace=False)
        sums[differ] = source.normal(0, 30, len(differ))
        rate = mean_rate(
            ByDocument.from_whole_documents(sums),
            ByDocument.from_whole_documents(np.full(n, 100)),
            threshold=0.0,
            rng=source,
            unit="nats",
        )
        decided += min(rate.p_above, rate.p_below) <= 0.05
        assert rate.low < 0 < rate.high
        assert rate.low <= rate.value <= rate.high
    assert decided == 0


@given(seed=st.integers(0, 10_000), threshold=st.floats(-0.02, 0.06))
def test_p_values_and_bounds_tell_the_same_story(seed, threshold):
    """p ≤ 5 % exactly where the one-sided 95 % bound (the end of the two-sided 90 % interval) clears the threshold."""
    candidate, reference, tokens = documents(12, 0.02, 0.04, seed)
    estimate = mean_rate(
        difference(candidate, reference),
        tokens,
        threshold=threshold,
        rng=rng(),
        unit="nats",
        level=0.90,
        draws=draw_document_counts(12, 999, rng()),
    )
    assert (estimate.p_above <= 0.05) == (estimate.low > threshold)
    assert (estimate.p_below <= 0.05) == (estimate.high < threshold)


@given(seed=st.integers(0, 10_000))
def test_swapping_the_arms_flips_the_sign(seed):
    candidate, reference, tokens = documents(15, 0.03, 0.05, seed)
    draws = draw_document_counts(15, 499, rng())
    there, back = (
        mean_rate(difference(*arms), tokens, threshold=0.0, rng=rng(), unit="nats", draws=draws)
        for arms in ((candidate, reference), (reference, candidate))
    )
    assert there.value == pytest.approx(-back.value)
    assert there.low == pytest.approx(-back.high)
    assert (there.p_above, there.p_below) == (back.p_below, back.p_above)


@pytest.mark.parametrize("n", [28, 29, 200])
def test_documents_that_do_not_differ_exclude_a_share_of_others_and_no_size(n):
    """29 equal documents show at 5 % that fewer than a tenth differ, but not by how much."""
    sums, tokens = each(*[0.0] * n), each(*[100] * n)
    rate = mean_rate(sums, tokens, threshold=0.01, rng=rng(), unit="nats")
    assert (rate.value, rate.low, rate.high) == (0.0, -math.inf, math.inf)
    assert (rate.p_above, rate.p_below) == (1.0, pytest.approx(0.9**n))
    assert (rate.p_below <= 0.05) == (n >= 29)
    assert rate.method == f"the same in each of {n} documents, no spread to resample"
    tie = mean_rate(sums, tokens, threshold=0.0, rng=rng(), unit="nats")
    assert (tie.p_above, tie.p_below) == (1.0, 1.0)
    assert tie.method.startswith("tied: ")
    beyond = mean_rate(sums, tokens, threshold=-0.1, rng=rng(), unit="nats")
    assert (beyond.p_above, beyond.p_below) == (pytest.approx(0.9**n), 1.0)


@pytest.mark.parametrize("n", [200, 299, 300])
def test_of_a_perplexity_without_any_rise_ruined_documents_are_to_be_excluded(n):
    """If ruin costs a nat per token, a share ln 1.01 of ruined documents raises perplexity by 1 %: 300 exclude it."""
    reference, tokens = each(*[150.0] * n), each(*[100] * n)
    rise = estimate_perplexity_rise(reference, reference, tokens, threshold=0.01, rng=rng())
    assert (rise.value, rise.low, rise.high, rise.p_above) == (0.0, -1.0, math.inf, 1.0)
    assert rise.p_below == pytest.approx((1 - math.log(1.01)) ** n)
    assert (rise.p_below <= 0.05) == (n >= 300)
    assert needed_sample_size(rise, 0.05) == pytest.approx(300, abs=3)


def test_sums_added_up_in_another_order_tie():
    """A mixture of two decoders with equal decisions equals one of them, for any weights."""
    _, reference, tokens = documents(60, 0.0, 0.0)
    mixed = reference.with_values(0.3 * reference.values + 0.7 * reference.values)
    assert (mixed.values != reference.values).any()
    tie = estimate_perplexity_rise(mixed, reference, tokens, threshold=0.0, rng=rng())
    assert (tie.p_above, tie.p_below) == (1.0, 1.0)
    assert tie.method.startswith("tied: ")


def test_the_same_rise_in_every_document_on_the_threshold_shows_nothing():
    rate = mean_rate(each(32.0, 64.0, 128.0), each(64, 128, 256), threshold=0.5, rng=rng(), unit="nats")
    assert (rate.value, rate.p_above, rate.p_below) == (0.5, 1.0, 1.0)
    assert rate.method.startswith("tied")


def test_one_document_has_no_spread():
    rise = estimate_perplexity_rise(each(11.0), each(10.0), each(5), threshold=0.01, rng=rng())
    assert (rise.low, rise.high, rise.p_above, rise.p_below) == (-1.0, math.inf, 1.0, 1.0)


def test_a_few_documents_that_differ_are_counted_and_bounded():
    """One of thirty: up to 17 % may still differ; if each differs as much, the mean moves by 17 % of its rate."""
    tokens = ByDocument.from_whole_documents(np.full(30, 100))
    sums = np.zeros(30)
    sums[4] = 1.0
    rate = mean_rate(ByDocument.from_whole_documents(sums), tokens, threshold=0.01, rng=rng(), unit="nats")
    share = stats.binomtest(1, 30).proportion_ci(0.95).high
    assert (rate.low, rate.high) == pytest.approx((-0.01 * share, 0.01 * share))
    assert rate.p_below == pytest.approx(stats.binom.cdf(1, 30, 0.1))
    near = mean_rate(ByDocument.from_whole_documents(sums), tokens, threshold=0.0005, rng=rng(), unit="nats")
    assert near.p_below == pytest.approx(stats.binom.cdf(1, 30, 0.05))
    assert near.p_above == 1.0


@pytest.mark.parametrize(("differing", "resampled"), [(FEWEST_DIFFERING - 1, False), (FEWEST_DIFFERING, True)])
def test_as_many_as_mean_something_are_resampled(differing, resampled):
    sums = np.zeros(40)
    sums[:differing] = np.arange(1.0, differing + 1)
    rate = mean_rate(
        ByDocument.from_whole_documents(sums),
        ByDocument.from_whole_documents(np.full(40, 10)),
        threshold=0.0,
        rng=rng(),
        unit="nats",
    )
    assert ("bootstrap" in rate.method) is resampled
    assert (f"{differing} of 40 documents differ" in rate.method) is not resampled


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": each(1, 0)}, "tokens"),
        ({"tokens": each(1)}, "tokens"),
        ({"nll_candidate": each(1.0, math.nan)}, "nll_candidate"),
        ({"nll_reference": each(1.0, math.inf)}, "nll_reference"),
        ({"nll_reference": each(1.0)}, "nll_reference"),
        ({"nll_candidate": each(), "nll_reference": each(), "tokens": each()}, "nll_candidate"),
        ({"threshold": -1.0}, "threshold"),
        ({"draws": np.ones((9, 3))}, "draws"),
    ],
)
def test_bad_measurements_are_refused_by_name(change, named):
    good = {"nll_candidate": each(1.0, 2.0), "nll_reference": each(1.0, 1.5), "tokens": each(1, 2)}
    with pytest.raises(BadArgument, match=rf"^{named}(\[1\])?="):
        estimate_perplexity_rise(**(good | {"threshold": 0.01, "rng": rng()} | change))


@pytest.mark.parametrize(
    "column", [np.array([1.0, 2.0]), ByItem.from_independent_items(np.array([1.0, 2.0])), ByPair(np.array([1.0, 2.0]))]
)
def test_a_perplexity_rise_is_of_documents_and_of_nothing_else(column):
    """A type checker refuses these; without one, an error names the type."""
    good = each(1.0, 1.5)
    for name in ("nll_candidate", "nll_reference", "tokens"):
        columns = {"nll_candidate": good, "nll_reference": good, "tokens": good} | {name: column}
        with pytest.raises(BadArgument, match=f"^{name}=.*ByDocument"):
            estimate_perplexity_rise(**columns, threshold=0.01, rng=rng())


def test_a_rate_is_of_one_kind_of_unit():
    items, weights = ByItem.from_independent_items(np.array([1.0, 3.0, 2.5])), np.array([1, 2, 2])
    rate = mean_rate(items, ByItem.from_independent_items(weights), threshold=0.0, rng=rng(), unit="blocks")
    assert (rate.noun, rate.n) == ("items", 3)
    assert "of items" in rate.method
    with pytest.raises(BadArgument, match=r"^tokens='ByDocument'"):
        mean_rate(items, ByDocument.from_whole_documents(weights), threshold=0.0, rng=rng(), unit="blocks")


# --- profile ------------------------------------------------------------------------------------------------------


def test_steps_and_slope_of_a_profile_without_noise_are_exact():
    tokens, mean = np.array([20, 20, 20]), np.array([4.0, 3.0, 3.5])
    columns = ByDocument.from_whole_documents(tokens[:, None] * mean), ByDocument.from_whole_documents(tokens)
    steps = estimate_entropy_changes(*columns, threshold=0.0, rng=rng())
    assert [step.value for step in steps] == pytest.approx([-1.0, 0.5])
    assert [step.p_above for step in steps] == pytest.approx([1.0, 0.9**3])
    assert [step.p_below for step in steps] == pytest.approx([0.9**3, 1.0])
    slope = estimate_entropy_slope(*columns, threshold=0.0, rng=rng())
    assert slope.value == pytest.approx(np.polyfit([1, 2, 3], mean, 1)[0])


def test_a_profile_of_one_layer_is_refused():
    with pytest.raises(BadArgument, match="entropy_sums"):
        estimate_entropy_changes(
            ByDocument.from_whole_documents(np.ones((3, 1))),
            ByDocument.from_whole_documents(np.ones(3)),
            threshold=0.0,
            rng=rng(),
        )


# --- slope over positions ----------------------------------------------------------------------------------------


def by_position(n: int, slope: float, spread: float, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, y and document of tokens; each document's slope varies by ``spread`` around ``slope``."""
    source = np.random.default_rng(seed)
    lengths = source.integers(5, 40, n)
    document = np.repeat(np.arange(n), lengths)
    x = np.log2(1.0 + np.concatenate([np.arange(length) for length in lengths]))
    slopes = slope + spread * source.standard_normal(n)
    return x, 3.0 + slopes[document] * x + 0.1 * source.standard_normal(len(x)), document


def slope_of(x, y, document, threshold=0.0):
    return estimate_within_document_slope(
        x, y, DocumentMembership(document), threshold=threshold, rng=rng(), unit="nats per doubling"
    )


def test_the_slope_is_that_of_least_squares_with_a_level_of_each_document():
    x, y, document = by_position(40, -0.2, 0.1)
    found = slope_of(x, y, document)
    levels = (document[:, None] == np.arange(40)).astype(float)
    fitted = np.linalg.lstsq(np.column_stack([x, levels]), y, rcond=None)[0]
    assert found.value == pytest.approx(fitted[0], rel=1e-9)
    assert found.low < found.value < found.high
    assert (found.n, found.unit) == (29, "nats per doubling")  # of 40, weighted by the spread of positions
    assert found.p_below < 0.01 < found.p_above


def test_a_slope_knows_no_origin_and_scales_with_its_units():
    x, y, document = by_position(30, 0.1, 0.2)
    here, there = slope_of(x, y, document), slope_of(x + 7, 3 * y - 5, document)
    assert (there.value, there.low, there.high) == pytest.approx((3 * here.value, 3 * here.low, 3 * here.high))


def test_long_easy_documents_make_no_slope_within_documents():
    """Simpson's paradox: y rises in every document, and over all tokens it falls."""
    x, y, document = by_position(60, 0.1, 0.02)
    y = y - 2.0 * np.log2(np.bincount(document))[document]
    assert stats.linregress(x, y).slope < -0.2
    found = slope_of(x, y, document)
    assert found.value == pytest.approx(0.1, abs=0.02)
    assert found.p_above < 0.001


def test_the_slopes_interval_is_that_of_documents_and_not_of_tokens():
    """Every token four times within its document: repeated tokens narrow nothing."""
    x, y, document = by_position(30, 0.1, 0.2)
    once, fourfold = slope_of(x, y, document), slope_of(*(np.tile(column, 4) for column in (x, y, document)))
    assert (fourfold.low, fourfold.high) == pytest.approx((once.low, once.high))
    halves = 2 * document + np.arange(len(x)) % 2
    as_if_independent = slope_of(x, y, halves)
    assert as_if_independent.high - as_if_independent.low < 0.8 * (once.high - once.low)


def test_document_numbers_are_names_in_any_order():
    x, y, document = by_position(20, 0.1, 0.2)
    shuffled = np.random.default_rng(0).permutation(len(x))
    here, there = slope_of(x, y, document), slope_of(x[shuffled], y[shuffled], 10 * document[shuffled] + 3)
    assert (there.value, there.low, there.high) == pytest.approx((here.value, here.low, here.high))


def test_documents_of_one_position_weigh_nothing():
    x, document = np.array([1.0, 3.0, 1.0, 3.0, 2.0, 2.0]), np.array([0, 0, 1, 1, 2, 2])
    y = np.array([1.0, 5.0, 2.0, 4.0, 9.0, -3.0])
    found = slope_of(x, y, document)
    assert found.value == pytest.approx(1.5)
    assert found.n == 2


def test_one_position_has_no_slope():
    with pytest.raises(BadArgument, match="no slope over one position"):
        slope_of(np.ones(6), np.arange(6.0), np.arange(6))


def test_within_documents_of_one_token_there_is_no_slope():
    with pytest.raises(BadArgument, match="no slope over one position"):
        slope_of(np.arange(6.0), np.arange(6.0), np.arange(6))


# --- how many documents would decide ------------------------------------------------------------------------------


def test_four_times_the_documents_halve_the_distance_needed():
    candidate, reference, tokens = documents(30, 0.0, 0.05, seed=2)
    few = estimate_perplexity_rise(candidate, reference, tokens, threshold=0.03, rng=rng())
    number = needed_sample_size(few, 1e-4)
    assert few.p_below > 1e-4
    assert number > 30
    repeated = (
        ByDocument.from_whole_documents(np.tile(x.values, -(-number // 30))) for x in (candidate, reference, tokens)
    )
    more = estimate_perplexity_rise(*repeated, threshold=0.03, rng=rng())
    assert more.p_below <= 3e-4  # requested: 1e-4; the bootstrap's smallest is as large


def test_no_number_decides_a_value_on_the_threshold():
    rate = mean_rate(each(1.0, 3.0), each(10, 10), threshold=0.2, rng=rng(), unit="nats")
    assert needed_sample_size(rate, 0.05) is None


def test_a_price_is_paid_for_what_no_sample_shows():
    """Compared with the written sup over shares: the grid is right to a few per cent, and never below."""

    def base(gaps):
        return stats.norm.sf(gaps / 0.002)

    shares = np.linspace(0, 0.2, 20_001)
    for gap, worst, n in ((0.01, 1.0, 400), (0.006, 0.2, 200), (0.01, 0.0, 50), (-0.001, 1.0, 300)):
        exact = ((1 - shares) ** n * base(gap - shares * worst)).max()
        assert exact * (1 - 1e-9) <= pvalue_with_unseen_units(base, gap, worst, n) <= min(1.0, 1.03 * exact)


def test_a_long_tail_of_losses_that_the_sample_may_lack_costs_certainty(monkeypatch):
    """An unseen document may lie twice as far out as the most extreme seen one."""
    monkeypatch.setattr(rates, "NEIGHBOUR_BLOCKS", ())  # their sampling error pays for nothing unseen
    each = np.exp(1.6 * np.random.default_rng(0).standard_normal(200))
    nats = 0.004 * (each - each.mean()) / each.std() + math.log(1.01) - 0.0007
    paid, bare = (rise_of(nats, worst).p_below for worst in (0.0, None))
    assert paid > 1.15 * bare


def rise_of(nats, worst, tokens=100):
    """Estimate the perplexity rise of documents that lose ``nats`` per token."""
    count = ByDocument.from_whole_documents(np.full(len(nats), tokens))
    full = count.with_values(2.0 * count.values)
    arms = full.with_values(full.values + count.values * nats), full, count
    return estimate_perplexity_rise(*arms, threshold=0.01, rng=rng(), worst=worst)


def test_only_gains_below_zero_cost_certainty_that_a_rise_is_real(monkeypatch):
    monkeypatch.setattr(rates, "NEIGHBOUR_BLOCKS", ())
    nats = 0.016 + 0.02 * np.random.default_rng(0).standard_exponential(60) - 0.02
    lengths = np.where(
        np.arange(60) % 12 == 0, 2000, 100
    )  # no document gains, although long ones pull the sum far down
    without = np.where(lengths > 100, 0.010, 0.04) + 0.003 * np.random.default_rng(0).standard_normal(60)
    paid, bare = (rise_of(without, worst, lengths).p_above for worst in (0.0, None))
    assert paid == bare
    gains = np.where(np.arange(60) % 20 == 0, -0.05, nats)
    paid, bare = (rise_of(gains, worst).p_above for worst in (0.0, None))
    assert paid > bare


def test_a_long_document_weighs_no_more_than_four_median_ones():
    sums, weights = cap_document_weights(each(1.0, 3.0, 4.0, 50.0), each(2.0, 3.0, 4.0, 100.0))
    assert (weights.values / [2, 3, 4, 100]).tolist() == pytest.approx([1, 1, 1, 0.14])
    assert (sums.values / weights.values).tolist() == pytest.approx([0.5, 1.0, 1.0, 0.5])


@pytest.mark.parametrize(("n", "counts"), [(15, ()), (16, (16,)), (31, (16,)), (32, (32, 16)), (200, (32, 16))])
def test_the_sampling_error_is_also_that_of_blocks_of_neighbours(n, counts):
    residuals = np.repeat(rng().standard_normal(-(-n // 2)), 2)[:n]
    sure = Estimate(0.5, 0.4, 0.6, n, 1e-9, 1e-9, "nats", "", "documents", distance=ThresholdDistance(-0.5, 1e-9))
    found = widen_by_neighbour_blocks(sure, residuals, threshold=0.0)
    errors = []
    for count in counts:
        totals = np.array([part.sum() for part in np.split(residuals, block_starts(n, count)[1:])])
        errors.append((count, math.sqrt(count / (count - 1) * (totals @ totals))))
    assert found.distance.error == pytest.approx(max([1e-9, *(error for _, error in errors)]))
    assert found.p_above == pytest.approx(max([1e-9, *(stats.t.sf(0.5 / error, count - 1) for count, error in errors)]))
    assert found.p_below == pytest.approx(
        max([1e-9, *(stats.t.cdf(0.5 / error, count - 1) for count, error in errors)])
    )
    reaches = [0.1, *(stats.t.ppf(0.975, count - 1) * error for count, error in errors)]
    assert (found.low, found.high) == pytest.approx((0.5 - max(reaches), 0.5 + max(reaches)))


def block_starts(n, count):
    return np.linspace(0, n, count, endpoint=False).round().astype(int)


def test_documents_by_one_author_are_worth_less_beside_each_other():
    """Ten documents an author: beside each other as in a corpus, then scattered, where no block can see them."""
    rise = 0.01 + 0.02 * np.repeat(rng().standard_normal(20), 10)
    tokens = ByDocument.from_whole_documents(np.full(200, 100))
    beside, scattered = (
        mean_rate(tokens.with_values(100 * each), tokens, threshold=0.0, rng=rng(), unit="nats")
        for each in (rise, rng().permutation(rise))
    )
    assert beside.high - beside.low > 2 * (scattered.high - scattered.low)
    assert beside.p_above > 20 * scattered.p_above
    items = ByItem.from_independent_items(100 * rise), ByItem.from_independent_items(np.full(200, 100))
    assert mean_rate(*items, threshold=0.0, rng=rng(), unit="nats").p_above < 0.05 * beside.p_above, "drawn at random"


@pytest.mark.parametrize("n", [320, 1000])
def test_the_number_needed_leaves_the_price_and_the_scatter_of_four_samples_in_five(n):
    """A rise of 0.2 %: of the requested number, the sample that four of five exceed still decides."""

    def of(count, higher=0.0):
        each = 0.002 + 0.01 * rng().permutation(stats.norm.ppf((np.arange(count) + 0.5) / count))
        each += higher * each.std(ddof=1) / math.sqrt(count)
        tokens = ByDocument.from_whole_documents(np.full(count, 100))
        full = tokens.with_values(200.0 + 0 * each)
        return estimate_perplexity_rise(full.with_values(200 + 100 * each), full, tokens, threshold=0.01, rng=rng())

    number = needed_sample_size(of(n), 0.05)
    assert of(number, stats.norm.ppf(0.8)).p_below <= 0.053
    assert number == n or of(int(0.9 * number), stats.norm.ppf(0.8)).p_below > 0.05
    fewest, most = needed_sample_range(of(n), 0.05)
    assert n <= fewest <= number <= most


def test_a_forecast_decides_four_of_five_fresh_samples():
    """Documents of mean 0.1 and deviation 1, of which a hundred show one standard error."""
    ones = ByDocument.from_whole_documents(np.ones(100))
    seen = stats.norm.ppf((np.arange(100) + 0.5) / 100)
    seen = ones.with_values(0.1 + rng().permutation(seen) / seen.std(ddof=1))
    number = needed_sample_size(mean_rate(seen, ones, threshold=0.0, rng=rng(), unit="nats"), 0.05)
    draws, many = rates.draw_document_counts(number, 199, rng()), ByDocument.from_whole_documents(np.ones(number))
    decided = [
        mean_rate(many.with_values(0.1 + source.standard_normal(number)), many, threshold=0.0, rng=source, unit="",
                  draws=draws).p_above <= 0.05
        for source in map(np.random.default_rng, range(200))
    ]  # fmt: skip
    assert 0.7 < np.mean(decided) < 0.9


def test_a_skewed_rise_that_a_normal_one_would_decide_asks_for_more():
    """Documents that rise by 3 % but with a long tail of gains: two standard errors above, yet uncertain."""
    tail = rng().permutation(np.exp(1.2 * stats.norm.ppf((np.arange(100) + 0.5) / 100)))
    each = 0.015 * (2 - tail / tail.mean())
    tokens = ByDocument.from_whole_documents(np.full(100, 100))
    full = tokens.with_values(200.0 + 0 * each)
    rise = estimate_perplexity_rise(full.with_values(200 + 100 * each), full, tokens, threshold=0.01, rng=rng())
    (leg,) = decide_legs([build_leg_test("x", rise, "above", 0.01, {"documents": 30})])
    assert leg.outcome == "inconclusive"
    assert 100 < leg.enough < 250
    assert leg.remedy in leg.reason


def test_the_number_needed_of_unequal_documents_says_that_it_counts_equal_ones():
    weight = np.tile([400, 20, 20, 20], 30)
    tokens = ByDocument.from_whole_documents(weight)
    full = tokens.with_values(2.0 * weight)
    each = np.linspace(-0.01, 0.013, 120)
    rise = estimate_perplexity_rise(full.with_values(weight * (2 + each)), full, tokens, threshold=0.01, rng=rng())
    (leg,) = decide_legs([build_leg_test("x", rise, "above", 0.01, {"documents": 30})])
    assert leg.n < 60
    assert "120 unequal documents count as" in leg.reason
    assert "documents of equal weight would decide it" in leg.remedy


def test_the_excess_of_a_saving_over_anothers_is_a_share_of_full_depths_work():
    """100 units at full depth: one family saves 50, the other 30; the excess is 20 %, of the other's work 29 %."""
    tokens = np.full(40, 10)
    found = handmade_losses(np.ones((40, 3)), np.tile([100.0, 50.0, 70.0], (40, 1)), tokens)
    assert estimate_saving(found[1], threshold=0.0, rng=rng()).value == pytest.approx(0.5)
    assert estimate_saving(found[1], threshold=0.0, rng=rng(), against=found[2]).value == pytest.approx(0.2)


# ---------------------------------------------------------------- the mean of an earlier sample


def mean_of(values: np.ndarray, threshold: float = 1.0) -> Estimate:
    """Student's estimate of a mean, whose interval has no skew."""
    n, error = len(values), float(values.std(ddof=1) / math.sqrt(len(values)))
    reach = float(stats.t.ppf(0.975, n - 1)) * error
    t = (values.mean() - threshold) / error
    tails = float(stats.t.sf(t, n - 1)), float(stats.t.cdf(t, n - 1))
    return Estimate(float(values.mean()), values.mean() - reach, values.mean() + reach, n, *tails, "tokens", "", "rows")


def ratio_to(now: np.ndarray, before: np.ndarray, threshold: float) -> Estimate:
    record = mean_of(before)
    return estimate_ratio_to_sample(
        mean_of(now), record.value, (record.low, record.high), record.n, threshold=threshold
    )


def test_two_samples_are_compared_by_welchs_test() -> None:
    rng = np.random.default_rng(3)
    now, before = rng.normal(2.4, 0.5, 40), rng.normal(2.6, 0.9, 15)
    found = ratio_to(now, before, 1.0)
    assert found.p_below == pytest.approx(stats.ttest_ind(now, before, equal_var=False, alternative="less").pvalue)
    assert found.p_above == pytest.approx(1 - found.p_below)
    assert found.value == pytest.approx(now.mean() / before.mean())
    shifted = stats.ttest_ind(now, 0.95 * before, equal_var=False, alternative="less").pvalue
    assert ratio_to(now, before, 0.95).p_below == pytest.approx(shifted)


@pytest.mark.parametrize("end", ["low", "high"])
def test_the_interval_of_a_ratio_ends_where_the_test_of_its_level_does(end: str) -> None:
    rng = np.random.default_rng(3)
    now, before = rng.normal(2.4, 0.5, 40), rng.normal(2.6, 0.9, 40)
    bound = getattr(ratio_to(now, before, 0.95), end)
    found = ratio_to(now, before, bound)
    assert min(found.p_below, found.p_above) == pytest.approx(0.025, rel=0.1)


def test_a_sample_taken_for_exact_refutes_far_too_often() -> None:
    """At the threshold one run in twenty may fail; with fifteen earlier documents taken for exact many more do."""
    rng, share = np.random.default_rng(0), 0.95
    failed = {"sample": 0, "exact": 0}
    for _ in range(400):
        before, now = rng.normal(2.6, 0.6, 15), rng.normal(share * 2.6, 0.6, 60)
        failed["sample"] += ratio_to(now, before, share).p_below <= 0.05
        failed["exact"] += mean_of(now, share * before.mean()).p_below <= 0.05
    assert failed["sample"] <= 0.08 * 400
    assert failed["exact"] >= 0.2 * 400


def test_samples_without_spread_or_bounds_decide_nothing() -> None:
    same = Estimate(2.0, 2.0, 2.0, 20, 1.0, 0.0, "tokens", "", "rows")
    for mean, interval in ((same, (2.1, 2.1)), (replace(same, low=-math.inf, high=math.inf), (2.0, 2.2))):
        found = estimate_ratio_to_sample(mean, 2.1, interval, 20, threshold=0.95)
        assert (found.p_above, found.p_below, found.low, found.high) == (1.0, 1.0, 0.0, math.inf)
