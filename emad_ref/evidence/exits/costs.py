"""FLOPs of what was decoded, in the parts that the paper mixes, as the decoder under test counted them:

confidence   every readout executed: full heads and pruned ones, the emitting one included
decoder      everything else of the decoder: blocks, attention, K/V copies, K and V of the sources
encoder      the sources
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.meters.flops import flops
from emad_ref.models.geometry import Geometry
from emad_ref.record import Work


@dataclass(frozen=True)
class Costs:
    """FLOPs per item."""

    confidence: float
    decoder: float
    encoder: float

    @property
    def together(self) -> float:
        """Everything executed."""
        return self.confidence + self.decoder + self.encoder

    @property
    def decoding(self) -> float:
        """Without the encoder, which no rule touches."""
        return self.confidence + self.decoder


@dataclass(frozen=True)
class Saving:
    """How many times fewer FLOPs, part by part; below 1 where more are executed."""

    confidence: float
    decoding: float
    together: float


def costs(work: Work, geometry: Geometry, items: int = 1) -> Costs:
    """``work`` of ``items`` items in parts."""
    found = flops(work, geometry)
    confidence = sum(found.readouts.values())
    return Costs(confidence / items, (found.total - confidence - found.encoder) / items, found.encoder / items)


def saving(before: Costs, after: Costs) -> Saving:
    """How many times fewer FLOPs ``after`` has than ``before``."""
    return Saving(
        float(before.confidence / after.confidence),
        float(before.decoding / after.decoding),
        float(before.together / after.together),
    )
