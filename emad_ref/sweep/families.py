"""The families that are compared at equal FLOPs.

A family is a sweep of one dial: EMAD's margin, a quantile, a depth, a threshold, a chunk length. All are decided by
replay of one trace; confidence rules need their columns in it. Which of its points a family sends is chosen on one
split and shown on another (``front``).
"""

from __future__ import annotations

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace
from emad_ref.point import OperatingPoint
from emad_ref.signals import GAP
from emad_ref.sweep.grids import (
    Saved,
    by_quantile,
    chunked,
    emad_margins,
    fixed_entropies,
    positional,
    quantiles,
    responses,
    truncations,
)

EMAD = "EMAD, mean − margin"
SETTINGS = 33  # points of each family's dial, full depth not counted
LEVELS = (0.15, 0.30, 0.45, 0.60)  # net savings at which families are compared; 15 % is the paper's least


def families(profile: Profile, calibration: Trace, saved: Saved, count: int) -> dict[str, list[OperatingPoint]]:
    """Every sweep by its name in tables, ``count`` points of each dial; the first is EMAD as published.

    ``profile`` knows entropy alone; thresholds of other signals come from ``calibration``, a trace of text of its kind.
    ``saved``: what a point saves on the split that points are chosen on (``grids.Spacing``).
    """
    layers, probes = profile.layers, profile.probes
    matched = {} if profile.statistics is None else {"EMAD, quantile": quantiles(profile, saved, count)}
    return {
        EMAD: emad_margins(profile, saved, count),
        **matched,
        "fixed truncation": truncations(layers),
        "fixed entropy": fixed_entropies(profile, saved, count),
        "softmax response": responses(layers, probes, saved, count),
        "chunked": chunked(profile, saved, count),
        "positional": positional(layers),
        "top-2 gap, quantile": by_quantile(GAP, calibration, probes, saved, count),
    }
