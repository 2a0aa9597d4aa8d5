"""Positional depth (SkipDecode): one depth per position for the whole batch, falling linearly; no rule at all.

    D_t = round(ceiling − (ceiling − floor) · min(t, period) / period),   t = 0 for the first decided token

Depth never rises, so no K/V is owed: a strong trivial rival of any rule under the monotone schedule.
"""

from __future__ import annotations

import numpy as np

from emad_ref.point import OperatingPoint
from emad_ref.record import Ints


def positional_depths(point: OperatingPoint, place: Ints) -> Ints:
    """int64 depth of the decided tokens at ``place`` (0 = the first of its sequence), any shape."""
    assert point.period is not None
    assert point.floor is not None
    gone = np.minimum(place, point.period) / point.period
    depths: Ints = np.rint(point.ceiling - (point.ceiling - point.floor) * gone).astype(np.int64)
    return depths
