"""Grids of operating points: the margins, thresholds and depths that a sweep replays."""

from __future__ import annotations

import numpy as np

from emad_ref.calibration.profile import Profile
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.policy.thresholds import fixed_entropy


def emad_margins(profile: Profile, count: int) -> list[OperatingPoint]:
    """EMAD points at ``count`` margins from 0 up to the highest target, both ends included."""
    highest = max(profile.targets_nats, default=0.0)
    return [profile.point(float(margin)) for margin in np.linspace(0.0, highest, count)]


def fixed_entropies(profile: Profile, count: int) -> list[OperatingPoint]:
    """Fixed-threshold points at ``count`` values of h₀ from 0 up to the profile's largest mean entropy."""
    values = np.linspace(0.0, max(profile.mean_nats), count)
    return [fixed_entropy(profile.layers, profile.probes, float(h0)) for h0 in values]


def truncations(layers: int) -> list[OperatingPoint]:
    """Fixed truncation at every depth below full."""
    return [truncated(layers, depth) for depth in range(1, layers)]


def whole_sweep(profile: Profile, count: int) -> list[OperatingPoint]:
    """Full depth, EMAD margins, fixed thresholds and truncations."""
    return [
        full_depth(profile.layers),
        *emad_margins(profile, count),
        *fixed_entropies(profile, count),
        *truncations(profile.layers),
    ]
