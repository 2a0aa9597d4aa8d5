"""Grids: both ends included, nothing that could not be replayed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.policy.thresholds import fires
from emad_ref.signals import LAYERWISE
from emad_ref.sweep.grids import (
    CHUNKS,
    DOUBTS,
    FINEST,
    by_quantile,
    chunked,
    early_exits,
    emad_margins,
    fixed_entropies,
    positional,
    responses,
    truncations,
)
from tests.traces import layerwise
from tests.unit.calibration.test_profile import PROFILE


def test_margins_run_from_none_to_the_highest_target():
    margins = emad_margins(PROFILE, 9)
    values = [point.margin_nats for point in margins]
    assert {0.0, 0.5, 1.0, 1.5, 2.0} <= set(values), "equal steps"
    assert values == sorted(values)
    assert margins[0].thresholds == (PROFILE.targets_nats,)
    assert max(margins[-1].thresholds[0]) == 0.0
    assert len({point.name for point in margins}) == len(margins)


def test_every_probe_is_asked_at_thresholds_near_zero():
    """Only very sure tokens pass there; a rival whose thresholds go as low would win for that alone."""
    step, targets = 2.0 / 16, PROFILE.targets_nats
    margins = emad_margins(PROFILE, 33)
    for probe, target in enumerate(targets):
        near = sorted(p.thresholds[0][probe] for p in margins if 1e-9 < p.thresholds[0][probe] < step / 2)
        assert len(near) >= 16 // len(targets) - 1
        assert near[0] == pytest.approx(FINEST * targets[0])
        assert np.diff(np.log(near)) == pytest.approx(np.log(near[1] / near[0]), rel=1e-3), target
    small = [p.thresholds[0][0] for p in fixed_entropies(PROFILE, 33)][1:9]
    assert small[0] == pytest.approx(FINEST * max(PROFILE.mean_nats))
    assert np.diff(np.log(small)) == pytest.approx(np.log(small[1] / small[0]))


@pytest.mark.parametrize("highest", [0.1, 1 / 3, math.pi, 1e-9])
@pytest.mark.parametrize("count", [2, 7, 100])
def test_the_last_margin_is_admissible_whatever_rounding_does(highest, count):
    margins = emad_margins(replace(PROFILE, targets_nats=(highest, 0.0)), count)
    assert len(margins) == count
    assert margins[-1].margin_nats == highest


def test_fixed_thresholds_run_from_nothing_exits_to_the_largest_mean():
    points = fixed_entropies(PROFILE, 11)
    levels = [point.thresholds[0][0] for point in points]
    assert len(points) == 11
    assert levels[0] == 0.0
    assert levels[-5:] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])
    assert levels == sorted(levels)
    assert all(len(set(point.thresholds[0])) == 1 for point in points)


def test_truncations_cover_every_depth_below_full():
    assert [point.ceiling for point in truncations(4)] == [1, 2, 3]
    assert truncations(1) == []


def test_responses_run_from_nothing_exits_to_everything_does():
    points = responses(4, (1, 2), 9)
    levels = [point.thresholds[0][0] for point in points]
    assert (levels[0], levels[-1]) == (1.0, 0.0)
    assert levels[1:-1] == pytest.approx([1 - 10.0**-n for n in range(7, 0, -1)], abs=1e-12)
    assert [point.name for point in points][::4] == ["response λ=1", "response λ=1−0.0001", "response λ=0"]


@pytest.mark.parametrize("pruning", ["none", "fixed", "decaying", "adaptive"])
@pytest.mark.parametrize("signal", ["softmax_response", "jsd_contrast"])
def test_confidence_rules_run_from_leaving_where_they_may_to_the_last_float_below_certainty(signal, pruning):
    points = early_exits(signal, 12, 512, 4, pruning)
    levels = [max(level for level in point.thresholds[0] if level < math.inf) for point in points]
    assert levels == sorted(levels)
    assert len(set(np.float32(levels).tolist())) == len(levels) == len(DOUBTS)
    assert (levels[0], levels[4]) == (0.0, 0.9), "everything leaves; the paper's threshold"
    assert np.float32(levels[-1]) < 1
    assert {point.schedule for point in points} == {"monotone"}
    assert len({point.name for point in points}) == len(points)
    assert [point.name.partition("λ=")[2] for point in points][::4][:4] == ["0", "0.9", "1−0.01", "1−0.001"]


def test_points_of_different_rules_have_different_names():
    sweeps = [
        ("softmax_response", "none"),
        ("softmax_response", "fixed"),
        ("saturation", "none"),
        ("jsd_contrast", "none"),
    ]
    names = [point.name for signal, pruning in sweeps for point in early_exits(signal, 12, 512, 4, pruning)]
    assert len(set(names)) == len(names)


def test_a_vocabulary_too_small_to_prune_has_no_sweep():
    with pytest.raises(BadArgument, match="do not prune it"):
        early_exits("softmax_response", 12, 50, 4, "fixed")


def test_chunks_ask_the_emad_rule_of_each_margin_at_every_length():
    points = chunked(PROFILE, 2)
    assert len(points) == 2 * len(CHUNKS)
    assert len({point.name for point in points}) == len(points)
    assert {(point.schedule, point.period) for point in points} == {("chunked", period) for period in CHUNKS}


def test_positional_sweeps_reach_every_floor():
    points = positional(4)
    assert {point.floor for point in points} == {1, 2, 3}
    assert len({point.name for point in points}) == len(points)


def test_a_profile_without_probes_still_has_a_sweep():
    assert [p.probes for p in emad_margins(replace(PROFILE, probes=(), targets_nats=()), 2)] == [()]


@pytest.mark.parametrize("name", LAYERWISE)
def test_quantiles_of_a_signal_let_the_same_share_of_tokens_pass_at_every_probe(name):
    """In the signal's own sense, on the text that they were taken from."""
    tokens, probes, rng = 400, (1, 2, 3), np.random.default_rng(0)
    column = rng.random((tokens, 4), dtype=np.float32) * np.array([9, 4, 2, 1], dtype=np.float32)
    number = np.arange(tokens)
    trace = Trace(
        signals=layerwise(column, column),
        nll_nats=column,
        top1=np.zeros((tokens, 4), dtype=np.int32),
        top1_probability=column,
        token=number,
        target=number,
        position=number,
        starts=np.array([0, tokens]),
        prompts=np.array([0]),
    )
    points = by_quantile(LAYERWISE[name], trace, probes, 9)
    assert len({point.name for point in points}) == len(points) == 9
    shares = [float(point.name.rpartition("p=")[2]) for point in points]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (1 / tokens, 1.0)
    assert shares[4:] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert {(point.signal, point.probes, point.layers) for point in points} == {(name, probes, 4)}
    for point, share in zip(points, shares, strict=True):
        passed = [fires(point, i, trace.column(name)[:, probe - 1]).mean() for i, probe in enumerate(probes)]
        assert passed == pytest.approx([share] * 3, abs=1.5 / tokens)
