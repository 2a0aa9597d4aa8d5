"""Running entropy statistics by batch equal those of the whole trace; quantiles err by less than a bucket."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emad_ref.calibration.entropy_statistics import (
    BUCKETS,
    EDGES_NATS,
    HIGHEST_NATS,
    BatchEntropies,
    EntropyStatistics,
    compute_trace_statistics,
    statistics_from_batch_entropies,
)
from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import assign_bins, bin_indices_without_last_features
from emad_ref.point import ThresholdBinSpec
from tests.handmade_traces import layerwise

LAYERS, WINDOW = 3, 50
GRID = ThresholdBinSpec(("position", "top1_probability"), position_edges=(5, 20))
SUMMED = 1e-12  # relative: the same float64 numbers, summed in a different order


def trace_of(windows, seed=0):
    """Return windows of 50 positions with entropies over seven orders of magnitude."""
    rng = np.random.default_rng(seed)
    tokens = windows * WINDOW
    entropy = np.exp(rng.normal(-2, 3, (tokens, LAYERS))).clip(0, 11).astype(np.float32)
    probability = rng.random((tokens, LAYERS), dtype=np.float32)
    return Trace(
        signals=layerwise(entropy, probability),
        nll_nats=entropy,
        top1=rng.integers(0, 9, (tokens, LAYERS)).astype(np.int32),
        top1_probability=probability,
        token=np.zeros(tokens, dtype=np.int64),
        target=np.zeros(tokens, dtype=np.int64),
        position=np.tile(np.arange(WINDOW), windows),
        starts=np.arange(windows + 1) * WINDOW,
        first_decided=np.zeros(windows, dtype=np.int64),
    )


def bins_in(trace):
    return assign_bins(GRID, trace.position + 1, trace.top1_probability[:, 1], trace.top1[:, 1])


def test_each_bin_has_the_mean_and_deviation_of_its_own_tokens():
    trace = trace_of(40)
    found = compute_trace_statistics(trace, GRID, 2)
    index = bins_in(trace)
    assert found.tokens.tolist() == np.bincount(index, minlength=9).tolist()
    assert found.tokens.min() > 0
    for number in range(GRID.bin_count):
        mine = trace.entropy_nats[index == number].astype(np.float64)
        assert found.mean_nats()[number] == pytest.approx(mine.mean(axis=0), rel=SUMMED)
        assert found.deviation_nats()[number] == pytest.approx(mine.std(axis=0), rel=1e-9)  # of a difference of squares
    assert found.sequences == 40


def test_batches_add_up_to_the_whole():
    batches = [trace_of(3, seed) for seed in range(4)]
    total = EntropyStatistics.empty(GRID.bin_count, LAYERS)
    for batch in batches:
        total = total + compute_trace_statistics(batch, GRID, 1)
    entropy = np.concatenate([batch.entropy_nats for batch in batches]).astype(np.float64)
    together = total.pool_bin_groups(np.zeros(GRID.bin_count, dtype=np.int64))
    assert together.mean_nats()[0] == pytest.approx(entropy.mean(axis=0), rel=SUMMED)
    assert together.tokens.tolist() == [len(entropy)]
    assert together.histogram.sum(axis=-1).tolist() == [[len(entropy)] * LAYERS]
    assert total.sequences == 12


def test_the_sums_of_a_layer_do_not_depend_on_the_layers_beside_it():
    trace = trace_of(40)
    whole, shown = compute_trace_statistics(trace, GRID, 2), (trace.top1[:, 1], trace.top1_probability[:, 1])
    for layer in range(LAYERS):
        read = BatchEntropies(trace.entropy_nats[:, [layer]], trace.position, *shown, trace.n_sequences)
        alone = statistics_from_batch_entropies(read, GRID)
        for name in ("sums", "squares", "histogram"):
            assert np.array_equal(getattr(alone, name)[:, 0], getattr(whole, name)[:, layer]), name


def test_pooled_bins_are_the_statistics_of_the_coarser_bins():
    trace = trace_of(20)
    pooled = compute_trace_statistics(trace, GRID, 1).pool_bin_groups(bin_indices_without_last_features(GRID, 1))
    coarse = compute_trace_statistics(trace, ThresholdBinSpec(("position",), position_edges=(5, 20)), None)
    assert pooled.tokens.tolist() == coarse.tokens.tolist()
    assert np.array_equal(pooled.histogram, coarse.histogram)
    assert pooled.sums == pytest.approx(coarse.sums, rel=SUMMED)
    assert pooled.squares == pytest.approx(coarse.squares, rel=SUMMED)


@settings(max_examples=50)
@given(st.floats(1e-4, 1 - 1e-4), st.integers(1, 400), st.integers(0, 1000))
@example(0.55, 180, 0)  # 99 of 180 are a share of 0.55, but the product is above 99 in float64
def test_a_quantile_lies_in_the_bucket_of_its_order_statistic(quantile, tokens, seed):
    whole = trace_of(8, seed)
    entropy = whole.entropy_nats[:tokens]
    statistics = compute_trace_statistics(whole, ThresholdBinSpec(), None)
    statistics = EntropyStatistics(
        np.array([tokens]),
        statistics.sums,
        statistics.squares,
        np.stack([np.histogram(column, EDGES_NATS)[0] for column in entropy.T.astype(np.float64)])[None],
        1,
    )
    # NumPy's ``inverted_cdf`` multiplies, and returns the next order statistic if the product is rounded up
    rank = int(np.argmax(np.arange(1, tokens + 1) / tokens >= quantile * (1 - 1e-12)))
    exact = np.sort(entropy.astype(np.float64), axis=0)[rank]
    found = statistics.quantile_nats(quantile)[0]
    assert (np.abs(found - exact) <= np.maximum(0.0041 * exact, 1e-6)).all()


def test_the_share_of_tokens_at_or_below_a_quantile_is_that_share():
    trace = trace_of(400)
    statistics = compute_trace_statistics(trace, ThresholdBinSpec(), None)
    for quantile in (0.05, 0.3, 0.5, 0.9):
        share = (trace.entropy_nats <= statistics.quantile_nats(quantile)).mean(axis=0)
        # a bucket of 0.41 % holds at most 0.0041 / (3 √(2π)) = 0.05 % of a lognormal of deviation 3; 20,000 tokens
        assert np.abs(share - quantile).max() < 0.001


def test_a_quantile_below_every_bucket_is_below_a_millionth():
    trace = trace_of(1)
    trace.entropy_nats[:] = 0
    level = compute_trace_statistics(trace, ThresholdBinSpec(), None).quantile_nats(0.5)
    assert (level >= 0).all()
    assert (level <= 1e-6).all()


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.1, 1.5, np.nan])
def test_a_quantile_outside_its_range_is_refused(quantile):
    with pytest.raises(BadArgument, match="but expected a share between 0 and 1, both excluded"):
        compute_trace_statistics(trace_of(1), ThresholdBinSpec(), None).quantile_nats(quantile)


def test_a_bin_without_tokens_has_no_mean_and_no_quantile():
    trace = trace_of(1)
    trace.top1_probability[:] = 0.9
    found = compute_trace_statistics(trace, GRID, 1)
    empty = found.tokens == 0
    assert empty.sum() == 6
    for value in (found.mean_nats(), found.deviation_nats(), found.quantile_nats(0.5)):
        assert np.isnan(value[empty]).all()
        assert np.isfinite(value[~empty]).all()


def test_equal_entropies_deviate_by_nothing():
    trace = trace_of(2)
    trace.entropy_nats[:] = 0.1
    assert np.abs(compute_trace_statistics(trace, ThresholdBinSpec(), None).deviation_nats()).max() < 1e-7


@pytest.mark.parametrize("value", [HIGHEST_NATS * 1.001, np.nan, np.inf, -0.01])
def test_an_entropy_that_no_vocabulary_has_is_refused(value):
    trace = trace_of(1)
    trace.entropy_nats[7, 1] = value
    with pytest.raises(BadArgument, match="entropies within 0–16 nats; check the weights and the dtype"):
        compute_trace_statistics(trace, ThresholdBinSpec(), None)


def test_features_of_the_first_probe_need_one():
    with pytest.raises(BadArgument, match="first_probe=None, but expected the layer that shows position×top1"):
        compute_trace_statistics(trace_of(1), GRID, None)


def test_no_bucket_is_wider_than_promised_and_the_last_is_above_every_vocabulary():
    assert len(EDGES_NATS) == BUCKETS + 1
    assert (EDGES_NATS[2:] / EDGES_NATS[1:-1] - 1).max() < 0.0041
    assert EDGES_NATS[-1] > np.log(1_000_000)
