"""Monotone non-increasing depth (EMAD, "KV-consistent scheduling"): D_t = min(D_{t-1}, first fire of t).

A token exits at the smallest probe ℓ ≤ D_{t-1} whose rule fires, else at the cap D_{t-1}. Because D never rises
again, every layer a later token runs holds K and V of all earlier tokens: nothing is ever owed.

Since a fire at a probe above the cap changes nothing, the recursion is a running minimum of first fires. The prompt
runs at the ceiling, so that is the first token's cap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import first_fires
from emad_ref.record import Floats, Ints
from emad_ref.schedule.flow import Leave
from emad_ref.schedule.interface import Admission, Schedule, counted_once, every_token, ran_once


def depths(signal: Floats, thresholds: Floats, probes: Ints, ceiling: int) -> Ints:
    """Depths [n] of one sequence that starts at ``ceiling``: the plain form of ``MONOTONE`` in replay.

    ``signal`` [n, probes] complete (a probe that is never read in decoding may hold any value, NaN included: NaN
    never fires); ``thresholds`` [probes] or [n, probes].
    """
    return np.minimum.accumulate(first_fires(signal <= thresholds, probes, ceiling))


def _admit(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    return Admission(trail[length - 1] if length else point.ceiling)


def _settle(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    """The running minimum by doubling: after spans of 1, 2, 4, … tokens each depth is the least of twice as many.

    A few passes of plain minima; ``np.minimum.accumulate`` is one, but several times as slow.
    """
    span = 1
    while span < len(depth):
        np.minimum(depth[span:], depth[:-span], out=depth[span:])
        span *= 2


MONOTONE = Schedule(
    name="monotone",
    admit=_admit,
    flow=Leave,
    why="under the monotone schedule depth never rises again within a sequence",
    asked=every_token,
    ran=ran_once,
    counted=counted_once,
    settle=_settle,
    never_rises=True,
    by_prefix=True,
)
