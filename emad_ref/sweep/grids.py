"""Grids of operating points: the margins, thresholds and depths that a sweep replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emad_ref.calibration.profile import Profile
from emad_ref.point import OperatingPoint, truncated
from emad_ref.policy.thresholds import fixed_entropy, response

CHUNKS = (4, 8, 16)  # tokens
FALLS = (8, 32, 128)  # tokens over which positional depth falls


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


def responses(layers: int, probes: Sequence[int], count: int) -> list[OperatingPoint]:
    """Softmax response at ``count`` thresholds from 1 (nothing exits) down to 0 (everything does)."""
    return [response(layers, probes, float(value)) for value in np.linspace(1.0, 0.0, count)]


def chunked(profile: Profile, count: int) -> list[OperatingPoint]:
    """The EMAD rule asked at the first token of each chunk only, at ``count`` margins and three chunk lengths."""
    return [
        replace(point, name=f"{point.name}, chunks of {period}", family="chunked", schedule="chunked", period=period)
        for point in emad_margins(profile, count)
        for period in CHUNKS
    ]


def positional(layers: int) -> list[OperatingPoint]:
    """Depth that falls with position alone, to every floor within several numbers of tokens."""
    return [
        OperatingPoint(
            f"falls to {floor} over {period}",
            "positional",
            layers,
            layers,
            schedule="positional",
            period=period,
            floor=floor,
        )
        for floor in range(1, layers)
        for period in FALLS
    ]


def quantiles(profile: Profile, count: int) -> list[OperatingPoint]:
    """EMAD with τ_ℓ = q-quantile of H_ℓ, at ``count`` values of q between 0 and 1, both ends left out."""
    return [profile.point(quantile=float(q)) for q in np.linspace(0.0, 1.0, count + 2)[1:-1]]
