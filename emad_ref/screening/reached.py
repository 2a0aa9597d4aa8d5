"""What families reach: the most that each saves net at a level of loss, chosen on one split and shown on another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """Chooses on ``validate`` what ``evaluate`` then judges; ``by``: the level that a point is taken to stay within."""

    def __init__(
        self,
        validate: Traced,
        judged: int,
        geometry: Geometry,
        by: Callable[[Losses, Floats], float] = Losses.bound,
    ):
        self._traced, self._geometry, self._by = validate, geometry, by
        self.losses = Losses.of(validate.own, validate.text.documents, judged)

    def bound(self, point: OperatingPoint) -> float:
        """The least level that ``point`` stays within."""
        return self._by(self.losses, sums(self._traced.own, self._traced.replay(point).nll_nats))

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
        rise = perplexity_rise(
            self._by(columns.nll_nats[:, number]),
            self._by(columns.nll_nats[:, 0]),
            self._tokens,
            threshold=level,
            rng=self._rng,
            draws=self._draws,
            worst=None,  # documents that this text lacks are the business of the guarantee
        )
        net, blocks = (self.saved(column, number) for column in (columns.flops, columns.depth))
        return Reached(family, level, point, net, rise, blocks, how)

    def saved(self, column: Floats, number: int) -> Estimate:
        """Share of full depth's, the first of ``column`` [windows, points], that the point ``number`` does without."""
        return mean_rate(
            self._by(column[:, 0] - column[:, number]),
            self._by(column[:, 0]),
            threshold=0.0,
            unit="share",
            rng=self._rng,
            draws=self._draws,
        )

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
    chosen = [(family, level, chooser.best(family, level)) for family in families for level in levels]
    return _judged(chosen, traced, geometry, seed)


def within_reach(
    families: Iterable[Family], level: float, traced: Traced, geometry: Geometry, seed: int = 0
) -> list[Row]:
    """The most that each family could save at ``level`` with any number of documents, itself chosen on ``traced``.

    Its point is the loosest of which these documents do not show that it loses more: more of them can only forbid it.
    An upper bound on what is to be had, and nothing to decode with.
    """
    dearest = Chooser(traced, traced.text.count, geometry, Losses.least)
    return _judged([(family, level, dearest.best(family, level)) for family in families], traced, geometry, seed)


def _judged(
    chosen: Sequence[tuple[Family, float, OperatingPoint | None]], traced: Traced, geometry: Geometry, seed: int
) -> list[Row]:
    judge = Judge(traced.text, seed)
    points = list(dict.fromkeys(point for _, _, point in chosen if point is not None))
    columns = replayed_columns(traced, points, geometry)
    return [
        Unreached(family, level) if point is None else judge.of(family, level, point, columns, 1 + points.index(point))
        for family, level, point in chosen
    ]
