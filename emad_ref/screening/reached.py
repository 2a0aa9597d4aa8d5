"""What families reach: the most that each saves net at a level of loss, chosen on one split and shown on another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.record import Floats
from emad_ref.replay import Replay, decode_flops, sums
from emad_ref.screening.choosing import Losses, loosest
from emad_ref.screening.families import Family
from emad_ref.screening.texts import Text
from emad_ref.screening.traced import Traced
from emad_ref.sweep.ceilings import filled_flops
from emad_ref.sweep.grids import Dial
from emad_ref.sweep.losses import Columns, columns_of
from emad_ref.verdict.bootstrap import RESAMPLES, document_draws
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.rates import mean_rate, perplexity_rise
from emad_ref.verdict.units import ByDocument


@dataclass(frozen=True, eq=False)
class Reached:
    """The ``point`` of one family that saves most within one level of loss.

    ``net``: share of full depth's FLOPs, ``rise`` of perplexity, ``blocks``: share of blocks; with intervals by
    document on evaluation text. ``how``: ``replayed`` (exact K and V, free depth charged for copies) or ``decoded``.
    """

    family: Family
    level: float
    point: OperatingPoint
    net: Estimate
    rise: Estimate
    blocks: Estimate
    how: str = "replayed"


@dataclass(frozen=True, eq=False)
class Unreached:
    """One family at one level below which nothing of it stays that saves anything."""

    family: Family
    level: float


Row = Reached | Unreached


class Chooser:
    """Chooses on ``validate`` what ``evaluate`` then judges."""

    def __init__(self, validate: Traced, judged: int, geometry: Geometry):
        self._traced, self._geometry = validate, geometry
        self.losses = Losses.of(validate.own, validate.text.documents, judged)

    def bound(self, point: OperatingPoint) -> float:
        """The least level that ``point`` will be confirmed at."""
        return self.losses.bound(sums(self._traced.own, self._traced.replay(point).nll_nats))

    def saved(self, point: OperatingPoint) -> float:
        """Net share of full depth's FLOPs."""
        full, mine = (self._traced.replay(each) for each in (full_depth(point.layers), point))
        spent, whole = (charged(self._traced, each, self._geometry).sum() for each in (mine, full))
        return float(1 - spent / whole)

    def best(self, family: Family, level: float) -> OperatingPoint | None:
        """Of all sets of probes, or of all points, the one that saves most within ``level``; None: none does."""
        within = [point for dial in family.dials if (point := self.loosest(dial, level)) is not None]
        within += [point for point in family.points if self.bound(point) <= level]
        saving = [(self.saved(point), point) for point in within]
        best = max(saving, key=lambda each: each[0], default=(0.0, None))
        return best[1] if best[0] > 0 else None

    def loosest(self, dial: Dial, level: float) -> OperatingPoint | None:
        """The point of ``dial`` that leaves most within ``level``; None: none does."""
        return loosest(dial, level, self.bound)


def charged(traced: Traced, replayed: Replay, geometry: Geometry) -> Floats:
    """[windows] FLOPs of decoding, of free depth with K and V above an exit copied."""
    trace = traced.of(replayed.point)
    free = replayed.point.schedule.startswith("free")
    return filled_flops(trace, replayed, geometry) if free else decode_flops(trace, replayed, geometry)


def replayed_columns(traced: Traced, points: Sequence[OperatingPoint], geometry: Geometry) -> Columns:
    """A column per point, full depth before them; charged as ``charged`` does."""
    replays = (traced.replay(point) for point in (full_depth(traced.own.layers), *points))
    return columns_of(traced.own, replays, lambda replayed: charged(traced, replayed, geometry))


class Judge:
    """Intervals by document of columns on evaluation text, all from the same samples of documents."""

    def __init__(self, text: Text, seed: int):
        self._documents = text.documents
        self._rng = np.random.default_rng(seed)
        self._draws = document_draws(text.count, RESAMPLES, self._rng)
        self._tokens = self._by(text.lengths)

    def of(
        self, family: Family, level: float, point: OperatingPoint, columns: Columns, number: int, how: str = "replayed"
    ) -> Reached:
        """``columns``: full depth first, ``point`` at ``number``."""
        rng, draws = self._rng, self._draws
        rise = perplexity_rise(
            self._by(columns.nll_nats[:, number]),
            self._by(columns.nll_nats[:, 0]),
            self._tokens,
            threshold=level,
            rng=rng,
            draws=draws,
        )
        net, blocks = (
            mean_rate(
                self._by(column[:, 0] - column[:, number]),
                self._by(column[:, 0]),
                threshold=0.0,
                unit="share",
                rng=rng,
                draws=draws,
            )
            for column in (columns.flops, columns.depth)
        )
        return Reached(family, level, point, net, rise, blocks, how)

    def _by(self, values: Floats) -> ByDocument:
        return ByDocument.summed(values, self._documents)


def reached(
    families: Iterable[Family],
    levels: Sequence[float],
    chooser: Chooser,
    traced: Traced,
    geometry: Geometry,
    seed: int = 0,
) -> list[Row]:
    """A row per family and level, judged on ``traced``. ``seed``: of the samples that intervals come from."""
    judge = Judge(traced.text, seed)
    chosen = [(family, level, chooser.best(family, level)) for family in families for level in levels]
    points = list(dict.fromkeys(point for _, _, point in chosen if point is not None))
    columns = replayed_columns(traced, points, geometry)
    return [
        Unreached(family, level) if point is None else judge.of(family, level, point, columns, 1 + points.index(point))
        for family, level, point in chosen
    ]
