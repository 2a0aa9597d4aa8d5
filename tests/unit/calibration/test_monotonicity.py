"""Monotonicity of a profile: a rise is tested by document, moments add up over text, older files hold fewer of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.entropy_statistics import (
    BatchEntropies,
    DocumentMoments,
    EntropyStatistics,
    statistics_from_batch_entropies,
)
from emad_ref.calibration.monotonicity import (
    describe_corrections,
    iterate_profile_warnings,
    largest_rise,
    rise_lower_bounds,
)
from emad_ref.calibration.profile import load_profile, merge, profile_from_statistics
from emad_ref.point import ThresholdBinSpec

LAYERS, TOKENS = 4, 20


def statistics_of(entropy, document):
    rows = len(entropy)
    unread = np.full(rows, -1, dtype=np.int32), np.full(rows, np.nan, dtype=np.float32)
    read = BatchEntropies(entropy.astype(np.float32), np.zeros(rows, dtype=np.int64), *unread, rows // TOKENS, document)
    return statistics_from_batch_entropies(read, ThresholdBinSpec())


def profile_with(entropy, document, *, read=(1, 2, 3, 4), layers=LAYERS, corpus="c"):
    return profile_from_statistics(
        EntropyStatistics.empty(1, len(read)) + statistics_of(entropy, document),
        read[:-1],
        layers=layers,
        read=read,
        model="m",
        fingerprint="f",
        corpora={corpus: len(entropy)},
        dtype="float32",
    )


def text(means, *, documents=40, by_document=0.1, seed=0):
    """Return entropies [tokens, L]: each document has its level around ``means`` by layer, tokens vary about it."""
    rng = np.random.default_rng(seed)
    document = np.repeat(np.arange(documents), TOKENS)
    level = np.array(means) + by_document * rng.standard_normal((documents, len(means)))
    return np.abs(level[document] + 0.05 * rng.standard_normal((len(document), len(means)))), document


def test_a_rise_is_named_from_its_lowest_layer_with_a_bound_below_it():
    profile = profile_with(*text([2.0, 1.5, 1.0, 1.8]))
    rise = largest_rise(profile)
    assert (rise.start, rise.end) == (3, 4)
    assert (rise.start_nats, rise.end_nats) == (profile.mean_nats[2], profile.mean_nats[3])
    assert 0.6 < rise.at_least_nats < rise.nats < 0.9
    (said,) = iterate_profile_warnings(profile)
    assert f"rises from {rise.start_nats:.2f} nats after layer 3 to {rise.end_nats:.2f} after layer 4" in said
    assert f"by {rise.at_least_nats:.2f} at least (95 %, by document)" in said


def test_a_rise_over_many_small_steps_is_one_rise():
    rise = largest_rise(profile_with(*text([1.0, 1.05, 1.1, 1.15], by_document=0.08)))
    assert (rise.start, rise.end) == (1, 4)


def test_a_falling_profile_raises_no_warning():
    assert list(iterate_profile_warnings(profile_with(*text([2.0, 1.5, 1.2, 0.4])))) == []


def test_a_rise_that_one_document_carries_is_not_shown():
    entropy, document = text([1.0, 0.8, 0.6, 0.55], by_document=0.0)
    entropy[document == 7, 3] += 8.0
    profile = profile_with(entropy, document)
    assert profile.mean_nats[3] > profile.mean_nats[2] + 0.1
    assert largest_rise(profile) is None


def test_flat_profiles_are_said_to_rise_in_one_of_twenty_runs_at_most():
    """A bound by tokens would err in most of them, because documents share levels."""
    shown = [largest_rise(profile_with(*text([1.0] * 4, documents=30, seed=seed))) for seed in range(200)]
    assert sum(rise is not None for rise in shown) <= 18  # of 200 at 5 %: more in one series of a hundred


def test_the_error_is_that_of_a_ratio_over_documents():
    rng = np.random.default_rng(3)
    entropy, document = text([1.0, 0.9, 1.2, 1.1])
    keep = rng.random(len(entropy)) < np.linspace(0.2, 1, 40)[document]  # documents of unequal length
    entropy, document = entropy[keep], document[keep]
    profile = profile_with(entropy, document)
    tokens = np.bincount(document)
    step = entropy.astype(np.float32).astype(float)[:, 2] - entropy.astype(np.float32)[:, 1]
    sums = np.bincount(document, weights=step)
    z = sums - sums.sum() / tokens.sum() * tokens
    error = np.sqrt(40 / 39 * (z @ z)) / tokens.sum()
    effective = tokens.sum() ** 2 / (tokens @ tokens)
    from scipy import stats

    expected = sums.sum() / tokens.sum() - stats.t.ppf(1 - 0.05 / 6, effective - 1) * error
    assert rise_lower_bounds(profile)[1, 2] == pytest.approx(expected, rel=1e-6)


def test_moments_do_not_depend_on_where_batches_are_cut():
    entropy, document = text([1.0, 0.9, 1.2, 1.1], documents=5)
    whole = statistics_of(entropy, document).documents
    for cuts in ([30], [10, 20, 35, 70], list(range(7, 100, 7))):
        total = DocumentMoments.empty(LAYERS)
        for rows in np.split(np.arange(len(document)), cuts):
            total = total + statistics_of(entropy[rows], document[rows]).documents
        assert total.count == whole.count == 5
        assert total.products == pytest.approx(whole.products, rel=1e-12)


def test_documents_of_two_corpora_are_never_one():
    one = profile_with(*text([1.0, 0.9, 0.8, 0.7], documents=1), corpus="a")
    other = profile_with(*text([1.0, 0.9, 0.8, 0.7], documents=1, seed=1), corpus="b")
    both = merge([one, other]).statistics.documents
    assert both.count == 2
    assert both.products == pytest.approx(one.statistics.documents.products + other.statistics.documents.products)


def test_one_document_bounds_nothing():
    profile = profile_with(*text([1.0, 0.5, 0.9, 0.2], documents=1))
    assert rise_lower_bounds(profile) is None
    assert largest_rise(profile).at_least_nats is None


@pytest.mark.parametrize("known", [True, False])
def test_moments_survive_the_file(tmp_path, known):
    entropy, document = text([2.0, 1.5, 1.0, 1.8])
    profile = profile_with(entropy, document if known else None)
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert (profile.statistics.documents is not None) == known
    unsure = "how sure that is cannot be told"
    assert any(unsure in said for said in iterate_profile_warnings(profile)) != known
    assert (merge([replace(profile, corpora={}, corpus="a"), profile]).statistics.documents is not None) == known


def test_a_profile_without_the_last_layer_says_so():
    entropy, document = text([2.0, 1.5])
    (said,) = iterate_profile_warnings(profile_with(entropy, document, read=(1, 2)))
    assert "the last layer was not read: whether entropy rises between layers 2 and 4 is not known" in said


def test_what_isotonic_regression_ironed_out_is_told_with_both_numbers():
    profile = profile_with(*text([2.0, 1.0, 1.4, 0.2]))
    said = describe_corrections(profile)
    assert "the mean of layer 3 most" in said or "the mean of layer 2 most" in said
    assert f"to {profile.targets_nats[1]:.4f} nats" in said
    assert describe_corrections(profile_with(*text([2.0, 1.5, 1.0, 0.2]))) == ""
