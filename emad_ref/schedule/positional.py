"""Positional depth (SkipDecode): one depth per position for the whole batch, falling linearly; no rule at all.

    D_t = round(ceiling − (ceiling − floor) · min(t, period) / period),   t = 0 for the first decided token

Depth never rises, so no K/V is owed: a strong trivial rival of any rule under the monotone schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emad_ref.point import OperatingPoint
from emad_ref.record import Bools, Ints
from emad_ref.schedule.flow import Leave
from emad_ref.schedule.interface import Admission, Schedule, counted_once, ran_once


def positional_depths(point: OperatingPoint, decided: Ints) -> Ints:
    """int64 depth of the decided tokens of these indices (0 = the first of its sequence), any shape."""
    assert point.period is not None
    assert point.floor is not None
    gone = np.minimum(decided, point.period) / point.period
    depths: Ints = np.rint(point.ceiling - (point.ceiling - point.floor) * gone).astype(np.int64)
    return depths


def _admit(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    return Admission(int(positional_depths(point, np.array([max(length - first, 0)]))[0]), held=True)


def _settle(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    depth[:] = positional_depths(point, np.arange(len(depth)))[:, None]


def _nobody(point: OperatingPoint, decided: Ints) -> Bools:
    return np.zeros(len(decided), dtype=np.bool_)


POSITIONAL = Schedule(
    name="positional",
    admit=_admit,
    flow=Leave,
    why="under the positional schedule the place of a token decides its depth",
    asked=_nobody,
    ran=ran_once,
    counted=counted_once,
    settle=_settle,
    never_rises=True,
    ruleless=True,
)
