"""How flat a model's entropy profile is, and what EMAD gains on it: one dot of the trend that EMAD-E11 asks about.

    slope   of mean H_ℓ over ℓ, in nats per layer, on the evaluation split: nearer to zero is flatter
    gain    the largest net FLOP reduction of any margin whose perplexity stays within METHODS' bounds; 0 if none does

Dots of several models and corpora make a trend (``trend``); one dot makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import permutation_test, spearmanr

from emad_ref.errors import BadArgument
from emad_ref.evidence.points import Points
from emad_ref.record import Floats
from emad_ref.sweep.select import cheapest_within_bounds
from emad_ref.verdict.interval import Estimate, profile_slope

LEAST_DOTS = 4  # of three dots, all orders but one differ from a falling line by a single swap


@dataclass(frozen=True)
class Flatness:
    """One model on one corpus; ``point`` names the margin that gains most, or is "no margin"."""

    model: str
    corpus: str
    slope: Estimate
    point: str
    gain: float


def flatness(points: Points, rng: np.random.Generator) -> Flatness:
    """The dot of a model on its corpus."""
    subject, traces = points.subject, points.traces
    slope = profile_slope(traces.entropy_sums, traces.lengths, threshold=0.0, rng=rng)
    return Flatness(subject.name, subject.corpus, slope, *gain_of(points))


def gain_of(points: Points) -> tuple[str, float]:
    """The margin that gains most at equal quality, and what it saves, net; ("no margin", 0.0) where none does."""
    best = cheapest_within_bounds(points.emad_sweep, points.full_loss.perplexity)
    if best is None or best.net_reduction <= 0:  # probes that never fire cost more than they save
        return "no margin", 0.0
    return best.point.name, best.net_reduction


def trend(dots: Sequence[Flatness]) -> tuple[float, float]:
    """(Spearman ρ of steepness and gain, exact two-sided p): the paper expects ρ > 0, steeper profiles gain more.

    ρ is NaN where all dots gain alike: equal ranks have no order.

    Raises:
        BadArgument: fewer dots than any order of which could mean something.
    """
    if len(dots) < LEAST_DOTS:
        raise BadArgument("dots", len(dots), f"at least {LEAST_DOTS} models or corpora", "judge more of them")
    steepness, gain = np.array([-dot.slope.value for dot in dots]), np.array([dot.gain for dot in dots])
    if np.ptp(gain) == 0 or np.ptp(steepness) == 0:
        return float("nan"), 1.0

    def rho(order: Floats) -> float:
        return float(spearmanr(order, gain).statistic)

    exact = permutation_test((steepness,), rho, permutation_type="pairings", n_resamples=np.inf)
    return float(exact.statistic), float(exact.pvalue)
