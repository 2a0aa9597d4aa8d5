"""How much any rule could save here at all: oracles on evaluation text (``sweep.ceilings``), at a few levels of loss.

What no rule reaches needs no text of its own to be chosen on: an oracle's dial is turned on the text that is judged, as
far as the rise of that very text allows. What it saves there has an interval, by document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.models.geometry import Geometry
from emad_ref.screening.families import LENS, OWN
from emad_ref.screening.reached import Judge
from emad_ref.screening.traced import Traced
from emad_ref.sweep.ceilings import Curve, Oracle, ceiling

SETTINGS = 64  # of each oracle's dial
ORACLES: tuple[Oracle, ...] = ("threshold", "price")


@dataclass(frozen=True)
class Slack:
    """The most that an oracle saves within ``level``: shares of blocks and, net of everything, of FLOPs.

    ``low``, ``high``: 95 % interval of ``net``.
    """

    oracle: str
    readout: str
    depth: str
    level: float
    blocks: float
    net: float
    low: float
    high: float


def slack(traced: Traced, geometry: Geometry, levels: Sequence[float], seed: int = 0) -> list[Slack]:
    """Every oracle by either readout at free and monotone depth, a row per level; ``seed``: of what is resampled."""
    found, judge = [], Judge(traced.text, seed)
    for oracle in ORACLES:
        for readout, trace in ((OWN, traced.own), (LENS, traced.tuned)):
            for depth in ("free", "monotone"):
                curve = ceiling(trace, geometry, oracle, monotone=depth == "monotone", count=SETTINGS)
                for level in levels:
                    blocks, at = most(curve, level)
                    net = judge.saved(curve.columns.flops, at)
                    found.append(Slack(oracle, readout, depth, level, blocks, net.value, net.low, net.high))
    return found


def most(curve: Curve, level: float) -> tuple[float, int]:
    """(share of blocks, place) of the point of ``curve`` that saves most of them with a rise of at most ``level``."""
    depth = curve.columns.depth.sum(axis=0)
    blocks = np.where(curve.rises <= level, 1 - depth / depth[0], 0.0)
    best = int(np.argmax(blocks))  # the first is full depth, which saves nothing
    return float(blocks[best]), best


def ceiling_at(found: Sequence[Slack], level: float) -> Slack:
    """The oracle that saves most net at ``level``: blocks that cost as much to leave save nothing."""
    return max((each for each in found if each.level == level), key=lambda each: each.net)
