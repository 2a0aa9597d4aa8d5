"""Tables of losses made by hand, for statistics that read a table and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.point import full_depth
from emad_ref.replay.losses import Losses

UNIT = 1_000_000  # of costs, which are whole numbers


def handmade_losses(nats: NDArray[Any], flops: NDArray[Any], tokens: NDArray[Any], names: Sequence[str] = ()) -> Losses:
    """Return documents of these sums, ``nats`` and ``flops`` [documents, points], ``tokens`` [documents].

    Layers run are as many as FLOPs, which are rounded to parts of ``UNIT``.
    """
    lost, spent = (
        np.array(nats, dtype=np.float64).T,
        np.rint(UNIT * np.array(flops, dtype=np.float64).T).astype(np.int64),
    )
    called = names or ["full depth", *(f"point {at}" for at in range(1, len(lost)))]
    points = tuple(replace(full_depth(12), name=name) for name in called)
    length = np.array(tokens, dtype=np.int64)
    return Losses(points, np.arange(len(length)), length, lost, np.zeros(lost.shape, dtype=np.int64), spent, spent)
