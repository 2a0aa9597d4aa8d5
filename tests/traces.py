"""Columns of traces made by hand: whatever signals there are, a trace has them all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.signals import ENTROPY, LAYERWISE


def layerwise(entropy_nats: NDArray[Any], others: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
    """``entropy_nats`` [tokens, L], and ``others`` [tokens, L] as every other signal of one layer."""
    return {name: entropy_nats if name == ENTROPY.name else others for name in LAYERWISE}
