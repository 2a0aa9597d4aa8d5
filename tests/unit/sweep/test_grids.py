"""Grids: both ends included, nothing that could not be replayed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from emad_ref.point import full_depth
from emad_ref.sweep.grids import emad_margins, fixed_entropies, truncations, whole_sweep
from tests.unit.calibration.test_profile import PROFILE


def test_margins_run_from_none_to_the_highest_target():
    margins = emad_margins(PROFILE, 5)
    assert [point.margin_nats for point in margins] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert margins[0].thresholds == (PROFILE.targets_nats,)
    assert max(margins[-1].thresholds[0]) == 0.0


@pytest.mark.parametrize("highest", [0.1, 1 / 3, math.pi, 1e-9])
@pytest.mark.parametrize("count", [2, 7, 100])
def test_the_last_margin_is_admissible_whatever_rounding_does(highest, count):
    margins = emad_margins(replace(PROFILE, targets_nats=(highest, 0.0)), count)
    assert len(margins) == count
    assert margins[-1].margin_nats == highest


def test_fixed_thresholds_run_from_nothing_exits_to_the_largest_mean():
    points = fixed_entropies(PROFILE, 6)
    assert [point.thresholds[0][0] for point in points] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert all(len(set(point.thresholds[0])) == 1 for point in points)


def test_truncations_cover_every_depth_below_full():
    assert [point.ceiling for point in truncations(4)] == [1, 2, 3]
    assert truncations(1) == []


def test_the_whole_sweep_holds_all_families_and_full_depth_once():
    points = whole_sweep(PROFILE, 3)
    assert [p.family for p in points] == ["full", *["emad"] * 3, *["fixed_entropy"] * 3, *["truncation"] * 3]
    assert points[0] == full_depth(4)


def test_a_profile_without_probes_still_has_a_sweep():
    assert [p.probes for p in emad_margins(replace(PROFILE, probes=(), targets_nats=()), 2)] == [(), ()]
