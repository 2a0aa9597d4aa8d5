"""How flat a model's entropy profile is, and what EMAD gains on it: one dot of the trend that EMAD-E11 asks about.

    slope   of mean H_ℓ over ℓ, in nats per layer, on the evaluation split: nearer to zero is flatter
    gain    net FLOP reduction, on the evaluation split, of the margin that saves most on the validation split within
            METHODS' bounds of perplexity there; 0 if none does

Dots of several models and corpora make a trend (``trend``); one dot makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import permutation_test, spearmanr

from emad_ref.errors import BadArgument
from emad_ref.evidence.rivals import Rivals
from emad_ref.evidence.traces import Traces
from emad_ref.record import Floats
from emad_ref.sweep.families import EMAD
from emad_ref.sweep.select import cheapest_within_bounds
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.rates import profile_slope

LEAST_DOTS = 4  # of three dots, all orders but one differ from a falling line by a single swap


@dataclass(frozen=True)
class Flatness:
    """One model on one corpus; ``point`` names the margin chosen, or is "no margin"."""

    model: str
    corpus: str
    slope: Estimate
    point: str
    gain: float


def flatness(traces: Traces, rivals: Rivals, rng: np.random.Generator) -> Flatness:
    """The dot of a model on its corpus."""
    slope = profile_slope(traces.entropy_sums, traces.lengths, threshold=0.0, rng=rng)
    gained = gain_of(rivals)
    return Flatness(traces.subject.name, traces.subject.corpus, slope, gained.point, gained.saved)


@dataclass(frozen=True)
class Gain:
    """What the margin ``point`` saves, net, and what it loses, on the evaluation split: shares of FLOPs, perplexity."""

    point: str
    saved: float
    rise: float


def gain_of(rivals: Rivals) -> Gain:
    """Of the margin that gains most at equal quality on validation; "no margin" where none does."""
    best = cheapest_within_bounds(rivals.validated(EMAD), rivals.validated_full.perplexity)
    if best is None or best.net_reduction <= 0:  # probes that never fire cost more than they save
        return Gain("no margin", 0.0, 0.0)
    judged = rivals.evaluated(best.point)
    return Gain(best.point.name, judged.net_reduction, judged.perplexity_rise)


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
