"""Criteria ranked by what they save at exactly the same loss, the ceilings that know the divergence beside them.

A criterion's front is chosen on validation text and crossed on evaluation text; a ceiling's is both on evaluation text,
and promises nothing. Everything executed is charged, as ``sweep.ceilings`` says: K and V above an exit as if copied,
which bounds what copies can save. Criteria share readout, probes and schedule: what differs is what decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.models.geometry import Geometry
from emad_ref.point import Estimator
from emad_ref.signals import relative_rise
from emad_ref.sweep.ceilings import COUNT, FREE, LEVELS, SLACK, Curve, ceiling, curve
from emad_ref.sweep.criteria import criteria
from emad_ref.sweep.front import Sheet, lower_hulls
from emad_ref.verdict.at_loss import RESAMPLES, saving_at_loss
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.units import DocumentOf


@dataclass(frozen=True, eq=False)
class Read:
    """One split through one readout: ``trace``, and ``documents`` [sequences] that its sequences were cut from."""

    trace: Trace
    documents: DocumentOf

    def sheets(self, points: Curve) -> tuple[Sheet, Sheet]:
        """(by FLOPs, by blocks) what a family of points did, by document."""
        columns, sums = points.columns, self.documents.sums
        nll, tokens = sums(columns.nll_nats), sums(points.tokens)
        return Sheet(nll, sums(columns.flops), tokens), Sheet(nll, sums(columns.depth), tokens)


@dataclass(frozen=True, eq=False)
class Rival:
    """A criterion or a ceiling, ``judged`` on evaluation text; ``chosen``: the same points on validation text, None for
    a ceiling.
    """

    name: str
    judged: Curve
    chosen: Curve | None = None

    @property
    def knows(self) -> bool:
        """Whether it knows what no rule can."""
        return self.chosen is None


@dataclass(frozen=True)
class Ranked:
    """What a family saves where it loses exactly ``level`` of perplexity: shares of FLOPs, net, and of blocks."""

    family: str
    level: float
    net: Estimate
    blocks: Estimate
    knows: bool


def rivals(
    chosen: Read,
    judged: Read,
    geometry: Geometry,
    probes: Sequence[int],
    gate: Estimator | None = None,
    *,
    monotone: bool = False,
    called: str = "",
) -> list[Rival]:
    """Every criterion at ``probes``, and both ceilings, of traces through the same readout; ``called``: that readout.

    Raises:
        BadArgument: as ``criteria`` and ``ceiling``.
    """
    suffix = f", {called}" if called else ""
    families = criteria(chosen.trace, probes, gate, schedule="monotone" if monotone else FREE)
    found = [
        Rival(f"{name}{suffix}", *(curve(name, read.trace, geometry, points, range(len(points)))
               for read in (judged, chosen)))
        for name, points in families.items()
    ]  # fmt: skip
    return ceilings(judged, geometry, monotone=monotone, probes=probes, called=called) + found


def ceilings(
    judged: Read, geometry: Geometry, *, monotone: bool = False, probes: Sequence[int] | None = None, called: str = ""
) -> list[Rival]:
    """The ceiling of rules that know the divergence, and the threshold that knows it; raises as ``ceiling``."""
    found = []
    for oracle in ("price", "threshold"):
        points = ceiling(judged.trace, geometry, oracle, monotone=monotone, probes=probes, count=COUNT)
        found.append(Rival(points.name + (f", {called}" if called else ""), points))
    return found


def ranked(
    families: Iterable[Rival],
    judged: Read,
    chosen: Read | None,
    rng: np.random.Generator,
    levels: Sequence[float] = LEVELS,
    resamples: int = RESAMPLES,
) -> list[Ranked]:
    """A row per family and level, by level, then by net saving, the largest first.

    ``chosen``: the split that fronts were chosen on; None where all families are ceilings.
    """
    rows = []
    for family in families:
        mine = judged.sheets(family.judged)
        theirs = (None, None) if family.chosen is None or chosen is None else chosen.sheets(family.chosen)
        for level in levels:
            net, blocks = (
                saving_at_loss(here, math.log1p(level), chosen=there, threshold=SLACK, rng=rng, resamples=resamples)
                for here, there in zip(mine, theirs, strict=True)
            )
            rows.append(Ranked(family.name, level, net, blocks, family.knows))
    return sorted(rows, key=lambda row: (row.level, -row.net.value))


def table_rows(rows: Iterable[Ranked]) -> list[dict[str, Any]]:
    """Plain rows of a table; shares are fractions."""
    return [
        {
            "rise %": row.level,
            "family": row.family,
            "net reduction %": row.net.value,
            "net low %": row.net.low,
            "net high %": row.net.high,
            "blocks %": row.blocks.value,
            "blocks low %": row.blocks.low,
            "blocks high %": row.blocks.high,
            "n": row.net.n,
        }
        for row in rows
    ]


def figure_rows(families: Iterable[Rival], judged: Read, chosen: Read | None = None) -> list[dict[str, Any]]:
    """Plain rows of the figure "saving against loss": every corner of every front, as it stands on the judged text."""
    found = []
    for family in families:
        (net, blocks), names = judged.sheets(family.judged), family.judged.names
        sheet = net if family.chosen is None or chosen is None else chosen.sheets(family.chosen)[0]
        savings, losses = sheet.whole
        (corners,) = lower_hulls(savings[None], losses[None])
        (saved, lost), (layers, _) = net.whole, blocks.whole
        found += [
            {
                "family": family.name,
                "point": names[at],
                "net reduction %": float(saved[at]),
                "blocks %": float(layers[at]),
                "rise %": relative_rise(float(lost[at] - lost[0])),
                "kind": "ceiling" if family.knows else "criterion",
            }
            for at in np.flatnonzero(corners)
        ]
    return found
