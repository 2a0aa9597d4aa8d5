"""Chooses thresholds so that text not seen yet confirms them: by a bound on the rise, not by its mean.

With a rise of m ± s nats per token on validation and ±s′ expected on evaluation, evaluation's own one-sided bound,
m′ + t·s′, stays below the level in 95 of 100 runs if

    m + t·√(s² + s′²) + t·s′ ≤ log(1 + level)

Standard errors are of documents (the linearised error of a ratio); t is Student's at 5 %, one-sided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.record import Floats
from emad_ref.replay import Ladder, sums
from emad_ref.signals import relative_rise
from emad_ref.sweep.grids import Dial
from emad_ref.verdict.units import DocumentOf

LEVEL = 0.05  # one-sided
STEPS = 16  # of a search between settings, each halving what is left of seven orders of magnitude
FINEST = 1e-7  # the least setting that is tried, as share of the largest


@dataclass(frozen=True, eq=False)
class Losses:
    """What full depth lost on the windows of one split, and the documents that they belong to.

    ``reference`` [windows] nats, ``tokens`` [windows], ``judged``: documents of the split that will confirm.
    """

    reference: Floats
    tokens: Floats
    documents: DocumentOf
    judged: int

    @classmethod
    def of(cls, trace: Trace, documents: DocumentOf, judged: int) -> Losses:
        full = Ladder(trace).replay(full_depth(trace.layers)).nll_nats
        return cls(sums(trace, full), trace.lengths.astype(np.float64), documents, judged)

    def bound(self, nll_nats: Floats) -> float:
        """The least level that a point with these sums [windows] of nats will be confirmed at: a rise of perplexity."""
        mean, error, count = self._rise(nll_nats)
        later = error * math.sqrt(count / self.judged)
        t = float(stats.t.ppf(1 - LEVEL, min(count, self.judged) - 1))
        return relative_rise(mean + t * math.hypot(error, later) + t * later)

    def least(self, nll_nats: Floats) -> float:
        """The largest level that these documents show such a point to exceed: the lower bound of its rise."""
        mean, error, count = self._rise(nll_nats)
        return relative_rise(mean - float(stats.t.ppf(1 - LEVEL, count - 1)) * error)

    def _rise(self, nll_nats: Floats) -> tuple[float, float, int]:
        """(mean nats per token, its standard error, documents)."""
        excess = self.documents.sums(nll_nats - self.reference)
        tokens = self.documents.sums(self.tokens)
        mean, count, total = excess.sum() / tokens.sum(), len(tokens), tokens.sum()
        if count < 2:
            raise BadArgument("documents", count, "at least 2", "one has no spread")
        away = excess - mean * tokens
        return float(mean), math.sqrt(count / (count - 1) * float(away @ away)) / float(total), count


def loosest(dial: Dial, level: float, bound: Callable[[OperatingPoint], float]) -> OperatingPoint | None:
    """The point of ``dial`` that leaves most, up to where ``bound`` of the next exceeds ``level``; None if none holds.

    Bounds are taken to rise with the setting; where they dip again later, the search stops early, which is safe.
    """
    if bound(dial.point(dial.most)) <= level:
        return _named(dial, dial.most)
    low, high = max(dial.least, FINEST * dial.most), dial.most
    if bound(dial.point(low)) > level:
        return None
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if bound(dial.point(middle)) <= level else (low, middle)
    return _named(dial, low)


def _named(dial: Dial, setting: float) -> OperatingPoint:
    return dial.named([setting])[0]
