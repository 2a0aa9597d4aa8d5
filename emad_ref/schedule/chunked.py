"""One depth per chunk of ``period`` tokens: the first up to the ceiling, the others exactly as deep as it.

The rule is asked at the first token of a chunk alone. Depth may rise from one chunk to the next: states wait, and are
taken along, as under ``free_deferred``; but no token may be taken up to a depth its chunk did not take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emad_ref.point import OperatingPoint
from emad_ref.record import Bools, Ints
from emad_ref.schedule.free import Deferred, counted_deferred, ran_deferred
from emad_ref.schedule.interface import Admission, Schedule


def _admit(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    assert point.period is not None
    within = max(length - first, 0) % point.period
    return Admission(trail[length - within], held=True) if within else Admission(point.ceiling)


def _settle(point: OperatingPoint, depth: NDArray[np.int16]) -> None:
    assert point.period is not None
    first = np.arange(len(depth)) // point.period * point.period
    depth[:] = depth[first]


def _first_of_a_chunk(point: OperatingPoint, decided: Ints) -> Bools:
    assert point.period is not None
    # divided and multiplied: NumPy takes longer over a remainder
    first: Bools = decided // point.period * point.period == decided
    return first


CHUNKED = Schedule(
    name="chunked",
    admit=_admit,
    flow=Deferred,
    why="under the chunked schedule a chunk keeps the depth of its first token",
    asked=_first_of_a_chunk,
    ran=ran_deferred,
    counted=counted_deferred,
    settle=_settle,
)
