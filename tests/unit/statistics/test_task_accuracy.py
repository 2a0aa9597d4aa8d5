"""A task counts if full depth beats guessing and the rule saves compute on it; otherwise a message gives the reason."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from emad_ref.absent import reason_if_absent
from emad_ref.errors import BadArgument
from pytest_emad.statistics.accuracy import AT_STAKE, LEAST_SAVED, TaskAccuracy, guessing_pvalue
from pytest_emad.statistics.units import ByItem


def right(count: int, n: int = 1000) -> ByItem:
    return ByItem.from_independent_items(np.arange(n) < count)


def task(count: int = 900, n: int = 1000, guess: float = 0.0, saving: float = 0.3) -> TaskAccuracy:
    return TaskAccuracy(right(count, n), right(count, n), guess, saving)


def test_a_task_that_is_solved_and_exercised_counts():
    assert task().is_counted
    assert task().exclusion is None
    assert task().accuracies == (0.9, 0.9)


@pytest.mark.parametrize(("saving", "counts"), [(LEAST_SAVED, True), (0.0499, False), (0.0, False), (-0.04, False)])
def test_the_rule_must_save_five_per_cent_of_the_tasks_own_flops(saving, counts):
    assert task(saving=saving).is_counted == counts
    said = {0.0499: "saves 5.0 %", 0.0: "saves 0.0 %", -0.04: "probing costs 4.0 %"}
    assert reason_if_absent(task(saving=saving).exclusion) == ("" if counts else f"not exercised: {said[saving]}")


def test_full_depth_must_beat_the_guess_and_be_shown_to():
    """22.6 % where guessing among the letters gives 23.5 %: above 0, but below an honest guess."""
    assert task(226).is_counted
    assert task(226, guess=0.235).exclusion.reason == "not solved: 22.6 % right, 23.5 % by guessing"
    assert not task(250, guess=0.235).is_counted, "1.5 points above, p = 0.14"
    assert task(270, guess=0.235).is_counted


def test_a_task_with_less_than_a_point_above_the_guess_has_nothing_to_lose():
    assert not task(9, guess=0.0).is_above_guessing
    assert task(10, guess=0.0).is_above_guessing
    assert AT_STAKE == 0.01


def test_both_reasons_are_given_where_both_hold():
    assert task(0, guess=0.25, saving=0.004).exclusion.reason == (
        "not solved: 0.0 % right, 25.0 % by guessing; not exercised: saves 0.4 %"
    )


@pytest.mark.parametrize(("guess", "saving"), [(1.2, 0.3), (-0.1, 0.3), (np.nan, 0.3), (0.2, 1.5), (0.2, np.nan)])
def test_what_is_no_share_is_refused(guess, saving):
    with pytest.raises(BadArgument, match="share"):
        task(guess=guess, saving=saving)


def test_an_empty_task_is_refused():
    with pytest.raises(BadArgument, match="at least one item"):
        guessing_pvalue(right(0, 0), 0.5)


# --- an exact test against guessing, at the effective number of items ----------------------------------------------


@pytest.mark.parametrize(("count", "guess"), [(0, 0.0), (1, 0.0), (27, 0.25), (60, 0.5), (100, 0.5), (100, 1.0)])
def test_over_distinct_items_it_is_the_exact_binomial(count, guess):
    exact = stats.binomtest(count, 100, guess, alternative="greater").pvalue
    assert guessing_pvalue(right(count, 100), guess) == pytest.approx(exact)


def test_repeats_of_one_item_count_once():
    """Forty items, each ten times, are not four hundred."""
    once = np.arange(40) < 26
    alone = guessing_pvalue(ByItem.from_independent_items(once), 0.5)
    repeated = guessing_pvalue(ByItem(np.repeat(once, 10), np.repeat(np.arange(40), 10)), 0.5)
    ignored = guessing_pvalue(ByItem.from_independent_items(np.repeat(once, 10)), 0.5)
    assert ignored < 1e-8
    assert repeated == pytest.approx(alone)
    every = ByItem(np.ones(400, dtype=bool), np.repeat(np.arange(40), 10))
    assert guessing_pvalue(every, 0.5) == pytest.approx(0.5**40)


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_at_the_guess_itself_it_errs_five_times_in_a_hundred(correlation):
    """Sixty paragraphs of five questions; a test that takes questions as independent errs more than twice as often."""
    rng, cluster = np.random.default_rng(8), np.repeat(np.arange(60), 5)
    clustered = alone = 0
    for _ in range(600):
        alike, shared = rng.random(60) < correlation, rng.random(60)[cluster]
        values = np.where(alike[cluster], shared, rng.random(300)) < 0.3
        clustered += guessing_pvalue(ByItem(values, cluster), 0.3) <= 0.05
        alone += guessing_pvalue(ByItem.from_independent_items(values), 0.3) <= 0.05
    assert clustered <= stats.binom.ppf(0.999, 600, 0.05)
    if correlation:
        assert alone > 2 * clustered


@pytest.mark.parametrize("count", [0, 25, 50])
def test_one_cluster_shows_nothing_by_itself(count):
    assert guessing_pvalue(ByItem(np.arange(50) < count, np.zeros(50, dtype=np.int64)), 0.001) == 1.0
