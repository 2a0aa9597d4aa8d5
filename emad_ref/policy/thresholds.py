"""Rules as plain points: where thresholds come from.

Every rule here is the same comparison, signal_ℓ ≤ τ_ℓ, with another τ:

``emad``           τ_ℓ = isotonic(mean H_ℓ) − m (EMAD, "Calibration details"); the calibrated targets are an argument.
``fixed_entropy``  τ_ℓ = h₀ at every probe (EMAD's confidence baseline).
``full``, ``truncation``  no probes; see ``emad_ref.point``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.record import Bools


def default_probes(layers: int) -> tuple[int, ...]:
    """Every 4 layers for small models, every 8 from 32 layers on (EMAD, "Calibration data"); every 2 below 12."""
    stride = 2 if layers < 12 else 4 if layers < 32 else 8
    return tuple(range(stride, layers, stride))


def entropy_matched(
    layers: int,
    probes: Sequence[int],
    targets_nats: Sequence[float],
    margin_nats: float = 0.0,
    schedule: str = "monotone",
) -> OperatingPoint:
    """EMAD: exit at the first probe ℓ with H_ℓ ≤ targets_nats[ℓ] − margin_nats."""
    return OperatingPoint(
        name=f"emad m={_short(margin_nats)}" + ("" if schedule == "monotone" else f" {schedule}"),
        family="emad",
        layers=layers,
        ceiling=layers,
        probes=tuple(probes),
        thresholds=(tuple(float(target) - margin_nats for target in targets_nats),),
        schedule=schedule,  # type: ignore[arg-type]  # the point validates the name and says which exist
        margin_nats=margin_nats,
    )


def _short(nats: float) -> str:
    """Two decimals where they say it all, else four digits: points of one sweep must not share a name."""
    return f"{nats:.2f}" if round(nats, 2) == nats else f"{nats:.4g}"


def fixed_entropy(layers: int, probes: Sequence[int], h0_nats: float) -> OperatingPoint:
    """One threshold h₀ for every probe, no profile."""
    return OperatingPoint(
        name=f"fixed h0={_short(h0_nats)}",
        family="fixed_entropy",
        layers=layers,
        ceiling=layers,
        probes=tuple(probes),
        thresholds=((h0_nats,) * len(tuple(probes)),),
    )


def require_one_bin(point: OperatingPoint) -> None:
    """Refuse thresholds per bin, which no rule here can tell apart yet."""
    if point.bins != "none":
        raise BadArgument("point.bins", point.bins, "none", "use one row of thresholds for all tokens")


def fires(point: OperatingPoint, probe: int, signal: NDArray[np.floating[Any]]) -> Bools:
    """Whether the rule at ``point.probes[probe]`` fires on ``signal``, any shape; NaN never fires.

    The one comparison of the package, for replay and decoding alike. The threshold is rounded to float32, as the
    signals are: one that lies between two floats must fall to the same side everywhere.
    """
    require_one_bin(point)
    return signal <= np.float32(point.thresholds[0][probe])
