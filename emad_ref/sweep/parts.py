"""EMAD in parts: each exchanged alone, from EMAD as published and from the best combination of all.

    readout     the model's own head              | a tuned lens
    criterion   entropy ≤ its profile less a margin | a gate; and an oracle, which knows √KL
    depth       only falls                        | free
    K/V         exact, above a free exit paid block by block when a deeper token asks | copied from the exit state

Depth that only falls owes no K/V above an exit, so that exchanging those alone changes nothing there. Free depth needs
some: between combinations it is replayed with exact states, charged as if copied (``ceilings.filled_flops``), which
leaves out what copies lose; what truly copied ones do is decoded, for the best combination. Back from it to exact K/V,
as EMAD has them, they are paid for in full: blocks are then moved, not saved.

Every combination is set by its one dial to save most net while perplexity rises by at most ``level`` on the split that
is chosen on, and is judged on another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace
from emad_ref.models.geometry import Geometry
from emad_ref.point import Estimator, OperatingPoint, ScheduleName, full_depth
from emad_ref.record import Floats
from emad_ref.replay import replay_all
from emad_ref.sweep.ceilings import FINEST, FREE, JUDGED, filled_columns, knowing, known_below, spread
from emad_ref.sweep.criteria import GATE, criteria
from emad_ref.sweep.losses import Columns, columns, rises

Split = Literal["chosen", "judged"]
Criterion = Literal["profile", "gate", "oracle"]
Depth = Literal["falling", "free"]
Kept = Literal["exact", "as if copied", "copied"]
Decoded = Callable[[Split, Sequence[OperatingPoint]], Columns]

COUNT = 48  # settings of each dial
TRIES = 5  # settings of copied K and V that are decoded to find one within the level, each stricter
SCHEDULES: dict[tuple[Depth, Kept], ScheduleName] = {
    ("falling", "exact"): "monotone",
    ("free", "exact"): "free_deferred",
    ("free", "as if copied"): FREE,
    ("free", "copied"): "copying",
}


@dataclass(frozen=True, eq=False)
class Readout:
    """One readout: text to choose on and text to judge on through it, and what was calibrated through it.

    ``profile``: of calibration text; its probes are everybody's. ``gate``: at those probes, recorded in both traces, or
    None. Divergences are recorded, too.
    """

    name: str
    chosen: Trace
    judged: Trace
    profile: Profile
    gate: Estimator | None = None


@dataclass(frozen=True)
class Way:
    """One combination. ``lens``: whether readouts go through it."""

    lens: bool
    criterion: Criterion
    depth: Depth
    kept: Kept

    @property
    def name(self) -> str:
        """E.g. ``tuned lens, gate, free depth, K/V copied``."""
        kept = "" if self.depth == "falling" else f", K/V {self.kept}"
        return f"{'tuned lens' if self.lens else 'own head'}, {self.criterion}, {self.depth} depth{kept}"


EMAD = Way(False, "profile", "falling", "exact")
BEST = Way(True, "gate", "free", "as if copied")


@dataclass(frozen=True, eq=False)
class Set:
    """A way at the setting that was chosen. ``columns`` [sequences, 2] of the judged text: full depth, and this.

    ``point``: full depth where nothing saves within the level; an oracle's is for replays alone.
    """

    way: Way
    point: OperatingPoint
    columns: Columns

    @property
    def net(self) -> float:
        """Share of full depth's FLOPs that it saves."""
        full, mine = self.columns.flops.sum(axis=0)
        return float(1 - mine / full)


@dataclass(frozen=True, eq=False)
class Exchange:
    """``part`` exchanged alone: ``after`` differs from ``before`` in nothing else.

    ``back``: from the best combination to EMAD's.
    """

    part: str
    before: Set
    after: Set
    back: bool

    @property
    def gain(self) -> float:
        """Net saving after, less that before."""
        return self.after.net - self.before.net


def exchanges(
    own: Readout,
    lens: Readout,
    geometry: Geometry,
    *,
    level: float = JUDGED,
    count: int = COUNT,
    decoded: Decoded | None = None,
) -> list[Exchange]:
    """Every part exchanged from EMAD as published, then every part of the best combination taken back, or replaced.

    Without a gate of the own head its exchange alone, and the readout's way back, go by the oracle on both sides.
    ``decoded``: what points do to the windows of a split where K and V are copied (``sweep.decoded``); None: left out.

    Raises:
        BadArgument: traces that lack the divergence, or a gate; as ``replay``.
    """
    known: dict[Way, Set] = {}

    def at(way: Way) -> Set:
        if way not in known:
            known[way] = _chosen(way, lens if way.lens else own, geometry, level, count, decoded)
        return known[way]

    gated = own.gate is not None
    alone = [
        ("readout", replace(EMAD, lens=True)),
        *([("criterion", replace(EMAD, criterion="gate"))] if gated else []),
        ("criterion, by an oracle", replace(EMAD, criterion="oracle")),
        ("monotone rule", replace(EMAD, depth="free", kept="as if copied")),
    ]
    judge = BEST if gated else replace(BEST, criterion="oracle")
    back = [
        ("readout", judge, replace(judge, lens=False)),
        ("criterion", BEST, replace(BEST, criterion="profile")),
        ("monotone rule", BEST, replace(BEST, depth="falling", kept="exact")),
        ("K/V", BEST, replace(BEST, kept="exact")),
    ]
    further = [("criterion, by an oracle", BEST, replace(BEST, criterion="oracle"))]
    if decoded is not None:
        further.append(("K/V, truly copied", BEST, replace(BEST, kept="copied")))
    return [
        *(Exchange(part, at(EMAD), at(way), False) for part, way in alone),
        *(Exchange(part, at(before), at(after), True) for part, before, after in back),
        *(Exchange(part, at(before), at(after), False) for part, before, after in further),
    ]


# ---------------------------------------------------------------- one combination


def _chosen(way: Way, readout: Readout, geometry: Geometry, level: float, count: int, decoded: Decoded | None) -> Set:
    points = _points(way, readout, count)
    traces = [knowing(trace) if way.criterion == "oracle" else trace for trace in (readout.chosen, readout.judged)]
    chosen, judged = (_columns(way, trace, geometry, points) for trace in traces)
    every, tokens = [full_depth(readout.chosen.layers), *points], readout.chosen.lengths.astype(np.float64)
    at = _most(chosen, tokens, level)
    if way.kept != "copied" or at == 0:
        return Set(way, every[at], _pair(judged, judged, at))
    assert decoded is not None, "copied K and V are asked for with their decoder alone"
    stricter = [at - (2**tried - 1) for tried in range(TRIES)]
    for point in (every[number] for number in stricter if number >= 1):
        if rises(_pair(chosen, decoded("chosen", [point]), 0), tokens)[1] <= level:
            return Set(way, point, _pair(judged, decoded("judged", [point]), 0))
    return Set(way, every[0], _pair(judged, judged, 0))


def _columns(way: Way, trace: Trace, geometry: Geometry, points: Sequence[OperatingPoint]) -> Columns:
    """By replay, full depth first; of copied K and V what exact ones lose, where a search starts."""
    every = [full_depth(trace.layers), *points]
    if way.kept == "exact":
        return columns(trace, geometry, every)
    exact = [point if point.fixed else replace(point, schedule=FREE) for point in every]
    return filled_columns(trace, geometry, replay_all(trace, exact))


def _points(way: Way, readout: Readout, count: int) -> list[OperatingPoint]:
    """Its dial on this readout, strict first."""
    schedule, profile, trace = SCHEDULES[way.depth, way.kept], readout.profile, readout.chosen
    if way.criterion == "gate":
        return criteria(trace, profile.probes, readout.gate, schedule=schedule, count=count)[GATE]
    if way.criterion == "oracle":
        known = np.sqrt(trace.divergence()[:, [probe - 1 for probe in profile.probes]])
        settings = spread(known, count)
        return [replace(known_below(trace, float(setting), profile.probes), schedule=schedule) for setting in settings]
    return [
        replace(profile.point(float(margin)), schedule=schedule, lens=trace.lens)
        for margin in _margins(trace, profile, count)
    ]


def _margins(trace: Trace, profile: Profile, count: int) -> Floats:
    """From the highest target, under which nothing leaves, down to 0: by how far entropies lie under their targets.

    And in equal ratios of what is left of the highest target: one sure token decides for all that come after it.
    """
    highest, probes = max(profile.targets_nats), [probe - 1 for probe in profile.probes]
    room = (np.asarray(profile.targets_nats) - trace.entropy_nats[:, probes]).max(axis=1)
    even = np.quantile(np.clip(room, 0.0, highest), np.linspace(0, 1, count - count // 3))
    fine = highest - np.geomspace(FINEST * highest, highest, count // 3)
    margins: Floats = np.unique(np.concatenate([even, fine, [0.0, highest]]))[::-1]
    return margins


def _most(columns: Columns, tokens: Floats, level: float) -> int:
    """The point that saves most net of those within ``level``; 0, full depth, where none saves anything."""
    spent = np.where(rises(columns, tokens) <= level, columns.flops.sum(axis=0), np.inf)
    return int(np.argmin(spent))


def _pair(first: Columns, second: Columns, at: int) -> Columns:
    """Column 0 of ``first`` beside column ``at`` of ``second``."""
    return Columns(
        *(
            np.stack([getattr(first, name)[:, 0], getattr(second, name)[:, at]], axis=1)
            for name in ("nll_nats", "wrong", "flops", "depth")
        )
    )
