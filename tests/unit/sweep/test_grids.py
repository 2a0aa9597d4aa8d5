"""Grids of thresholds: evenly spaced in savings, from full depth to the end of the sweep, every point replayable."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.profile import profile_of
from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import is_exit_rule_met
from emad_ref.models.geometry import geometry_of
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.replay.grids import (
    CHUNK_LENGTHS,
    SPACING_TOLERANCE,
    NetSavingFunction,
    ThresholdSweep,
    chunked_points,
    confidence_sweep,
    entropy_quantile_points,
    evenly_spaced_points,
    fixed_entropy_points,
    margin_points,
    positional_depth_points,
    signal_quantile_points,
    softmax_response_points,
    truncation_points,
)
from emad_ref.replay.losses import replay_losses
from emad_ref.signals import LAYERWISE
from tests.handmade_traces import window_trace
from tests.small_models import small_config
from tests.unit.calibration.test_profile import PROFILE

GEOMETRY = geometry_of(small_config("gpt_neox"))
LAYERS, TOKENS, SEQUENCES = GEOMETRY.layers, 40, 400


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return entropies from 1e-5 nats up, most of them large: the few certain tokens decide most of the savings."""
    rng, rows = np.random.default_rng(0), TOKENS * SEQUENCES
    entropy = (10 ** rng.uniform(-5, 0.6, (rows, LAYERS))).astype(np.float32)
    return window_trace(entropy, entropy, rng.random((rows, LAYERS), dtype=np.float32), TOKENS)


@pytest.fixture(scope="module")
def saved(trace: Trace) -> NetSavingFunction:
    return NetSavingFunction(trace, GEOMETRY)


DEEP = replace(
    PROFILE,
    layers=LAYERS,
    probes=(2, 4),
    read=tuple(range(1, LAYERS + 1)),
    mean_nats=(2.0,) * LAYERS,
    targets_nats=(2.0, 1.0),
)


def require_even(points: list[OperatingPoint], saved: NetSavingFunction, count: int) -> None:
    """Require the requested number of points, equally spaced in savings, from just above zero to the maximum."""
    savings = sorted(saved(point) for point in points)
    assert len(points) == count
    assert len({point.name for point in points}) == count
    step = savings[-1] / count
    off = np.abs(np.array(savings) - step * np.arange(1, count + 1)).max()
    assert off <= 2 * SPACING_TOLERANCE * step, "one sequence may jump from one token on"


def test_what_a_point_saves_is_what_its_row_of_the_loss_table_says(trace, saved) -> None:
    points = [full_depth(LAYERS), truncated(LAYERS, 2), DEEP.point(0.0), DEEP.point(1.9999)]
    assert [saved(point) for point in points] == replay_losses(trace, GEOMETRY, points).savings[1:].tolist()


@pytest.mark.parametrize("count", [5, 17, 33])
def test_every_dial_has_as_many_points_evenly_spaced_in_what_they_save(trace, saved, count) -> None:
    require_even(margin_points(DEEP, saved, count), saved, count)
    require_even(fixed_entropy_points(DEEP, saved, count), saved, count)
    require_even(signal_quantile_points(LAYERWISE["top2_gap"], trace, DEEP.probes, saved, count), saved, count)


def test_margins_run_from_none_up_to_where_next_to_nothing_is_saved(saved) -> None:
    margins = margin_points(DEEP, saved, 17)
    values = [point.margin_nats for point in margins]
    assert values == sorted(values)
    assert (values[0], margins[0].thresholds) == (0.0, (DEEP.targets_nats,))
    assert 1.9 < values[-1] < 2.0
    assert margins[0].name == "emad m=0.00"


def test_on_a_flat_profile_emad_is_the_fixed_threshold_of_the_same_height(trace, saved) -> None:
    flat = replace(DEEP, targets_nats=(1.6, 1.6))
    ours, fixed = margin_points(flat, saved, 33), fixed_entropy_points(flat, saved, 33)
    assert len(ours) == 33
    for mine, theirs in zip(reversed(ours), fixed, strict=True):
        assert np.float32(mine.thresholds).tolist() == np.float32(theirs.thresholds).tolist()


@pytest.mark.parametrize("highest", [0.1, 1 / 3, math.pi, 1e-9])
def test_every_margin_is_admissible_whatever_rounding_does(saved, highest) -> None:
    margins = margin_points(replace(DEEP, targets_nats=(highest, 0.0)), saved, 7)
    assert margins[0].margin_nats == 0.0
    assert all(point.margin_nats <= highest for point in margins)


def test_where_savings_jump_the_nearer_side_is_taken_once() -> None:
    """Zero or half of everything: no setting lies between."""
    asked = []

    def point(setting: float) -> OperatingPoint:
        asked.append(setting)
        return truncated(4, 4 if setting < 0.3 else 2)

    points = evenly_spaced_points(
        ThresholdSweep(point, lambda setting, digits: f"{setting:.{digits}g}", 0.0, 1.0), lambda p: 1 - p.ceiling / 4, 9
    )
    assert [point.ceiling for point in points] == [4, 2, 2], "nothing, the least that saves half, and the dial's end"
    assert float(points[1].name) == pytest.approx(0.3, rel=0.1)
    assert len(asked) < 200


def test_a_dial_that_saves_nothing_has_its_end() -> None:
    dial = ThresholdSweep(lambda setting: truncated(4, 4), lambda setting, digits: f"s={setting:.{digits}g}", 0.0, 2.0)
    assert [point.name for point in evenly_spaced_points(dial, lambda point: -0.1, 9)] == ["s=2"]


def test_names_have_as_many_digits_as_tell_points_apart() -> None:
    dial = ThresholdSweep(lambda setting: truncated(4, 2), lambda setting, digits: f"{setting:.{digits}g}", 0.0, 1.0)
    assert [point.name for point in dial.make_points([0.123, 0.1234567, 0.1234568])] == [
        "0.123",
        "0.1234567",
        "0.1234568",
    ]


def test_fixed_thresholds_go_as_far_as_the_highest_target(saved) -> None:
    points = fixed_entropy_points(DEEP, saved, 11)
    levels = [point.thresholds[0][0] for point in points]
    assert levels == sorted(levels)
    assert levels[-1] == 2.0
    assert all(len(set(point.thresholds[0])) == 1 for point in points)


def test_truncations_cover_every_depth_below_full() -> None:
    assert [point.ceiling for point in truncation_points(4)] == [1, 2, 3]
    assert truncation_points(1) == []


def test_responses_end_where_everything_exits(saved) -> None:
    points = softmax_response_points(LAYERS, (2, 4), saved, 9)
    levels = [point.thresholds[0][0] for point in points]
    assert levels == sorted(levels, reverse=True)
    assert (levels[-1], points[-1].name) == (0.0, "response λ=0")
    assert len({point.name for point in points}) == len(points)


@pytest.mark.parametrize("pruning", ["none", "fixed", "decaying", "adaptive"])
@pytest.mark.parametrize("signal", ["softmax_response", "jsd_contrast"])
def test_confidence_rules_run_from_certainty_to_leaving_where_they_may(signal, pruning) -> None:
    dial = confidence_sweep(signal, 12, 512, 4, pruning)

    def threshold(doubt: float) -> float:
        return max(level for level in dial.point(doubt).thresholds[0] if level < math.inf)

    assert (dial.least, dial.most) == (0.0, 1.0)
    assert [threshold(doubt) for doubt in (0.0, 0.1, 1.0)] == [1.0, 0.9, 0.0]
    assert dial.point(0.5).schedule == "monotone"
    assert [point.name.partition("λ=")[2] for point in dial.make_points([0.0, 1e-5, 0.1, 1.0])] == [
        "1",
        "1−1e-05",
        "0.9",
        "0",
    ]


def test_points_of_different_rules_have_different_names() -> None:
    sweeps = [
        ("softmax_response", "none"),
        ("softmax_response", "fixed"),
        ("saturation", "none"),
        ("jsd_contrast", "none"),
    ]
    names = [
        point.name
        for signal, pruning in sweeps
        for point in confidence_sweep(signal, 12, 512, 4, pruning).make_points([0.1, 0.5])
    ]
    assert len(set(names)) == len(names)


def test_a_vocabulary_too_small_to_prune_has_no_sweep() -> None:
    with pytest.raises(BadArgument, match="do not prune it"):
        confidence_sweep("softmax_response", 12, 50, 4, "fixed")


def test_chunks_share_the_points_of_one_family(saved) -> None:
    points = chunked_points(DEEP, saved, 10)
    assert [sum(point.period == period for point in points) for period in CHUNK_LENGTHS] == [3, 3, 4]
    assert len({point.name for point in points}) == len(points)
    assert {point.schedule for point in points} == {"chunked"}
    for period in CHUNK_LENGTHS:
        mine = [point for point in points if point.period == period]
        require_even(mine, saved, len(mine))


def test_positional_sweeps_reach_every_floor() -> None:
    points = positional_depth_points(4)
    assert {point.floor for point in points} == {1, 2, 3}
    assert len({point.name for point in points}) == len(points)


def test_a_profile_without_probes_still_has_a_sweep(saved) -> None:
    bare = replace(DEEP, probes=(), targets_nats=())
    assert [p.probes for p in margin_points(bare, saved, 2)] == [()]


def test_quantiles_stay_within_the_ends(trace, saved) -> None:
    profile = profile_of(trace, (2, 4), model="m", fingerprint="f", corpus="c", dtype="float32")
    points = entropy_quantile_points(profile, saved, 9)
    require_even(points, saved, 9)
    assert {point.family for point in points} == {"quantile"}


@pytest.mark.parametrize("name", LAYERWISE)
def test_quantiles_of_a_signal_let_the_same_share_of_tokens_pass_at_every_probe(trace, saved, name) -> None:
    """In the signal's own direction, on the text of the quantiles."""
    probes = 2, 4
    points = signal_quantile_points(LAYERWISE[name], trace, probes, saved, 9)
    shares = [float(point.name.rpartition("p=")[2]) for point in points]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert {(point.signal, point.probes, point.layers) for point in points} == {(name, probes, LAYERS)}
    for point, share in zip(points, shares, strict=True):
        passed = [
            is_exit_rule_met(point, i, trace.signal_at_every_layer(name)[:, probe - 1]).mean()
            for i, probe in enumerate(probes)
        ]
        assert passed == pytest.approx([share] * 2, abs=2 / len(trace))
