"""Bins: the bin of each token, fallback thresholds for thin bins, and buckets from token frequencies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.exit_rules import (
    assign_bins,
    assign_frequency_buckets,
    bin_indices_without_last_features,
    bin_names,
    dropped_feature_count_by_bin,
    frequency_rank_edges,
)
from emad_ref.point import FEATURES, ThresholdBinSpec

FREQUENCY = bytes([0, 1, 2, 1])
POSITION = np.array([1, 32, 33, 128, 129, 4000])
PROBABILITY = np.array([0.0, 0.39, 0.4, 0.69, 0.7, 1.0], dtype=np.float32)
TOP1 = np.array([0, 1, 2, 3, 0, 2])


def spec(*features):
    return ThresholdBinSpec(features, frequency=FREQUENCY if "frequency" in features else b"")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ((), [0, 0, 0, 0, 0, 0]),
        (("position",), [0, 0, 1, 1, 2, 2]),
        (("top1_probability",), [0, 0, 1, 1, 2, 2]),
        (("frequency",), [0, 1, 2, 1, 0, 2]),
        (("position", "frequency"), [0, 1, 5, 4, 6, 8]),
        (("frequency", "position"), [0, 3, 7, 4, 2, 8]),
        (("top1_probability", "position"), [0, 0, 4, 4, 8, 8]),
    ],
)
def test_edges_are_those_of_the_paper_and_two_features_make_a_grid(features, expected):
    index = assign_bins(spec(*features), POSITION, PROBABILITY, TOP1)
    assert index.tolist() == expected
    assert spec(*features).bin_count == (3 ** len(features))


def test_an_edge_of_the_probability_is_rounded_as_the_probabilities_are():
    """float32(0.7) < 0.7: a comparison in double precision would put it one bucket lower."""
    at = np.array([0.7], dtype=np.float32)
    assert at.astype(np.float64)[0] < 0.7
    for probability in (at, at.astype(np.float64)):
        assert assign_bins(spec("top1_probability"), np.array([1]), probability, np.array([0])).tolist() == [2]


def test_bins_keep_the_shape_of_the_tokens():
    grid = assign_bins(spec("position"), POSITION.reshape(2, 3), PROBABILITY.reshape(2, 3), TOP1.reshape(2, 3))
    assert grid.tolist() == [[0, 0, 1], [1, 2, 2]]


@pytest.mark.parametrize(
    ("feature", "change", "message"),
    [
        ("position", {"position": np.array([3, 0])}, "position=0, but expected positions counted from 1"),
        (
            "top1_probability",
            {"top1_probability": np.array([0.5, np.nan])},
            "top1_probability=nan, but expected top-1 probabilities",
        ),
        ("frequency", {"top1": np.array([0, 4])}, "top1=4, but expected token ids in 0–3"),
        ("frequency", {"top1": np.array([-1, 0])}, "top1=-1, but expected token ids in 0–3"),
    ],
)
def test_a_token_that_belongs_to_no_bin_is_refused_where_it_matters(feature, change, message):
    token = {"position": np.array([1, 2]), "top1_probability": np.array([0.1, 0.2]), "top1": np.array([0, 1])} | change
    with pytest.raises(BadArgument, match=message):
        assign_bins(spec(feature), **token)
    assert assign_bins(spec(), **token).tolist() == [0, 0]


def test_parents_join_the_bins_that_share_the_features_kept():
    grid = spec("position", "frequency")
    assert bin_indices_without_last_features(grid, 0).tolist() == list(range(9))
    assert bin_indices_without_last_features(grid, 1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert bin_indices_without_last_features(grid, 2).tolist() == [0] * 9
    with pytest.raises(BadArgument, match=r"dropped=3, but expected 0–2 features"):
        bin_indices_without_last_features(grid, 3)


@given(st.permutations(FEATURES), st.integers(0, 2), st.data())
def test_a_parent_is_the_bin_without_the_last_features(order, dropped, data):
    fine = spec(*order[:2])
    coarse = spec(*order[: 2 - dropped])
    token = (
        np.array([data.draw(st.integers(1, 300))]),
        np.array([data.draw(st.floats(0, 1))]),
        np.array([data.draw(st.integers(0, 3))]),
    )
    assert bin_indices_without_last_features(fine, dropped)[assign_bins(fine, *token)] == assign_bins(coarse, *token)


def test_a_thin_bin_gives_up_features_until_enough_tokens_stand_behind_it():
    tokens = np.array([500, 499, 0, 200, 200, 100, 10, 0, 0])
    assert dropped_feature_count_by_bin(spec("position", "top1_probability"), tokens, 500).tolist() == [
        0,
        1,
        1,
        1,
        1,
        1,
        2,
        2,
        2,
    ]
    assert dropped_feature_count_by_bin(spec("position"), np.array([9, 3, 0]), 4).tolist() == [0, 1, 1]
    assert dropped_feature_count_by_bin(spec("position"), np.array([1, 1, 1]), 500).tolist() == [1, 1, 1]
    assert dropped_feature_count_by_bin(spec(), np.array([1]), 500).tolist() == [0]
    with pytest.raises(BadArgument, match=r"tokens=\(2,\), but expected one count per bin \(3\)"):
        dropped_feature_count_by_bin(spec("position"), np.array([1, 2]), 500)


def test_frequency_buckets_rank_a_corpus_and_hold_about_a_third_of_it_each_under_zipf():
    vocabulary = 50_304
    assert frequency_rank_edges(vocabulary) == (37, 1363)
    ids = np.random.default_rng(0).permutation(vocabulary)
    counts = np.zeros(vocabulary, dtype=np.int64)
    counts[ids] = 10**9 // np.arange(1, vocabulary + 1)
    bucket = np.frombuffer(assign_frequency_buckets(counts), dtype=np.uint8)
    assert np.bincount(bucket).tolist() == [37, 1363 - 37, vocabulary - 1363]
    assert set(bucket[ids[:37]]) == {0}
    shares = np.bincount(bucket, weights=counts) / counts.sum()
    # harmonic sums are logarithms plus 0.577; the first bucket gets all of the latter
    assert np.abs(shares - 1 / 3).max() < 0.05


def test_equal_counts_rank_by_id_and_unseen_tokens_come_last():
    assert list(assign_frequency_buckets(np.array([0, 5, 5, 5, 5, 9, 0, 0]))) == [2, 0, 1, 1, 2, 0, 2, 2]
    with pytest.raises(BadArgument, match="at least 8; condition on another feature"):
        assign_frequency_buckets(np.array([1, 2, 3]))
    with pytest.raises(BadArgument, match="the corpus is empty"):
        assign_frequency_buckets(np.zeros(8, dtype=np.int64))


def test_bins_have_names_for_people_in_the_order_of_their_index():
    assert bin_names(spec()) == ("all tokens",)
    assert bin_names(spec("position")) == ("position 1–32", "position 33–128", "position 129+")
    names = bin_names(spec("top1_probability", "frequency"))
    assert names[:2] == ("top1_probability 0–0.4, frequency rank high", "top1_probability 0–0.4, frequency rank middle")
    assert names[5] == "top1_probability 0.4–0.7, frequency rank low"
    assert len(names) == 9
