"""Traces made by hand, with a column for every signal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.trace import Trace
from emad_ref.signals import ENTROPY, LAYERWISE


def layerwise(entropy_nats: NDArray[Any], others: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
    """Return all signals of one layer: ``entropy_nats`` [tokens, L], and ``others`` [tokens, L] for every other one."""
    return {name: entropy_nats if name == ENTROPY.name else others for name in LAYERWISE}


def window_trace(
    entropy_nats: NDArray[np.float32], nll_nats: NDArray[np.float32], others: NDArray[np.float32], window: int
) -> Trace:
    """Return a trace of windows of ``window`` tokens each, without prompts; all [tokens, L].

    ``others``: the top-1 probability and every signal but entropy. Token, target and position count from 0 in a window.
    """
    tokens, layers = entropy_nats.shape
    place = np.tile(np.arange(window), tokens // window)
    return Trace(
        signals=layerwise(entropy_nats, others),
        nll_nats=nll_nats,
        top1=np.zeros((tokens, layers), dtype=np.int32),
        top1_probability=others,
        token=place,
        target=place,
        position=place,
        starts=np.arange(0, tokens + 1, window),
        first_decided=np.zeros(tokens // window, dtype=np.int64),
    )
