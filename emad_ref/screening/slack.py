"""How much any rule could save here at all: oracles on evaluation text (``sweep.ceilings``), at a few levels of loss.

What no rule reaches needs no interval to be chosen by: an oracle's dial is turned on the text that is judged, as far as
the rise of that very text allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.models.geometry import Geometry
from emad_ref.screening.families import LENS, OWN
from emad_ref.screening.traced import Traced
from emad_ref.sweep.ceilings import Curve, Oracle, ceiling

SETTINGS = 64  # of each oracle's dial
ORACLES: tuple[Oracle, ...] = ("threshold", "price")


@dataclass(frozen=True)
class Slack:
    """The most that an oracle saves within ``level``: shares of blocks and, net of everything, of FLOPs."""

    oracle: str
    readout: str
    depth: str
    level: float
    blocks: float
    net: float


def slack(traced: Traced, geometry: Geometry, levels: Sequence[float]) -> list[Slack]:
    """Every oracle by either readout at free and monotone depth, a row per level."""
    found = []
    for oracle in ORACLES:
        for readout, trace in ((OWN, traced.own), (LENS, traced.tuned)):
            for depth in ("free", "monotone"):
                curve = ceiling(trace, geometry, oracle, monotone=depth == "monotone", count=SETTINGS)
                found += [Slack(oracle, readout, depth, level, *most(curve, level)) for level in levels]
    return found


def most(curve: Curve, level: float) -> tuple[float, float]:
    """(blocks, net) saved by the point of ``curve`` that saves most blocks with a rise of at most ``level``."""
    flops, depth = (column.sum(axis=0) for column in (curve.columns.flops, curve.columns.depth))
    blocks = np.where(curve.rises <= level, 1 - depth / depth[0], 0.0)
    best = int(np.argmax(blocks))  # the first is full depth, which saves nothing
    return float(blocks[best]), float(1 - flops[best] / flops[0])


def ceiling_at(found: Sequence[Slack], level: float) -> float:
    """Net share that the best of all oracles saves at ``level``: blocks that cost as much to leave save nothing."""
    return max(each.net for each in found if each.level == level)
