"""What the ablations share: probes and margins to try, and how a table's rows are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace
from emad_ref.evidence.bridging import Bridging
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.stopwatch import Stopwatch
from emad_ref.evidence.subject import Subject
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Unsupported
from emad_ref.record import Floats
from emad_ref.sweep.diagnostics import collapse
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.verdict.bootstrap import RESAMPLES, document_draws
from emad_ref.verdict.legs import finite
from emad_ref.verdict.rates import perplexity_rise
from emad_ref.verdict.times import total_ratio
from emad_ref.verdict.units import ByPair

TRIED = {"smoke": 2, "standard": 4, "full": 8}  # margins per profile, by budget
BEFORE = "tokens before first probe"

Row = dict[str, Any]


def require_quality(subject: Subject, bridging: Bridging) -> None:
    """Raises Unsupported with the reason where no table about quality can be made."""
    if reason := subject.without_quality or bridging.refusal:
        raise Unsupported(reason)


# ------------------------------------------------------------ ingredients


def strided(layers: int, stride: int) -> tuple[int, ...]:
    """Probes after every ``stride`` layers, the last layer left out."""
    return tuple(range(stride, layers, stride))


def margins(profile: Profile, budget: str) -> list[float]:
    """Margins in nats from 0 to below the profile's highest target, as many as the budget allows."""
    highest = max(profile.targets_nats)
    return [float(m) for m in np.linspace(0.0, highest, TRIED[budget], endpoint=False)]


def tried(evidence: Evidence) -> list[float]:
    """The margins of the run's own profile: every profile of an ablation is tried at the same."""
    return margins(evidence.traces.profile, evidence.study.budget.name)


def points(profile: Profile, margins: Iterable[float]) -> list[OperatingPoint]:
    """The profile's point at each margin under which anything can exit."""
    highest = max(max(row) for row in profile.bin_targets_nats or (profile.targets_nats,))
    return [profile.point(margin) for margin in margins if margin <= highest]


# ------------------------------------------------------------ rows


class Rows:
    """Rows about one evaluation split, their intervals from the same resamples of its documents."""

    def __init__(self, evidence: Evidence, rng: np.random.Generator):
        self._points, self._traces, self._rng = evidence.points, evidence.traces, rng
        self._geometry = evidence.loaded.geometry

    @cached_property
    def _draws(self) -> Floats:
        return document_draws(len(self._traces.lengths), RESAMPLES, self._rng)

    def at(self, points: Sequence[OperatingPoint], first: Row, trace: Trace | None = None) -> list[Row]:
        """One row per point; ``first``: leading columns. ``trace``: of the same windows, with estimates."""
        trace = self._traces.evaluation if trace is None else trace
        return [first | self._row(loss, trace) for loss in loss_table(trace, self._geometry, points)]

    def full(self, first: Row) -> Row:
        """The row of full depth."""
        return self.at([self._traces.subject.full], first)[0]

    def _row(self, loss: Loss, trace: Trace) -> Row:
        sums = self._points.nll(loss)
        rise = perplexity_rise(*sums, threshold=0.0, rng=self._rng, draws=self._draws)
        return quality(loss, trace) | {"rise interval %": finite(rise)}


def quality(loss: Loss, trace: Trace) -> Row:
    """Depth, reductions and perplexity of one replay of ``trace``.

    Rows that agree to the last digit are points that collapse alike: the median of tokens before the first probe says
    so; None without probes, or where most sequences never get there.
    """
    before = collapse(trace, loss.point) if loss.point.probes else math.inf
    return {
        "point": loss.point.name,
        "mean depth": loss.mean_depth,
        BEFORE: before if math.isfinite(before) else None,
        "gross reduction %": loss.gross_reduction,
        "net reduction %": loss.net_reduction,
        "perplexity": loss.perplexity,
        "rise %": loss.perplexity_rise,
    }


# ------------------------------------------------------------ time


def speeds(stopwatch: Stopwatch, subject: Subject, points: Mapping[str, OperatingPoint]) -> dict[str, Row]:
    """name → speed against full depth at batch 1, paired, with interval; None where the decoder declines the point."""
    accepted = {name: point for name, point in points.items() if _accepts(subject, point)}
    arms = {f"point {name}": point for name, point in accepted.items()}  # "full" is the name of the arm they all meet
    seconds = stopwatch.against_full(arms).seconds if arms else {}
    ratios = {
        name: total_ratio(ByPair(seconds["full"]), ByPair(seconds[f"point {name}"]), threshold=1.0) for name in accepted
    }
    return {
        name: {"speed ×": ratios[name].value, "speed interval": finite(ratios[name])} if name in ratios else UNTIMED
        for name in points
    }


UNTIMED: Row = {"speed ×": None, "speed interval": None}


def _accepts(subject: Subject, point: OperatingPoint) -> bool:
    try:
        with subject.open(point):
            return True
    except Unsupported:
        return False
