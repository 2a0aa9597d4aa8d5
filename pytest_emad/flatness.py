"""How flat a model's entropy profile is, and what EMAD gains on it: one dot of the trend that EMAD-E11 asks about.

    slope   of mean H_ℓ over ℓ, in nats per layer, on the evaluation split: nearer to zero is flatter
    gain    the largest net FLOP reduction of any margin whose perplexity stays within METHODS' bounds; 0 if none does

Dots of several models and corpora make a trend (``trend``); one dot makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import permutation_test, spearmanr

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.replay import sums
from emad_ref.sweep.select import cheapest_within_bounds
from emad_ref.verdict.interval import Estimate, profile_slope

if TYPE_CHECKING:
    from pytest_emad.session import Evidence

LEAST_DOTS = 4  # of three dots, all orders but one differ from a falling line by a single swap


@dataclass(frozen=True)
class Flatness:
    """One model on one corpus; ``point`` names the margin that gains most, or is "no margin"."""

    model: str
    corpus: str
    slope: Estimate
    gain: float
    point: str
    documents: int


def flatness(evidence: Evidence, rng: np.random.Generator) -> Flatness:
    """The dot of ``evidence``: its model on its corpus."""
    trace = evidence.evaluation
    entropy = np.stack([sums(trace, trace.entropy_nats[:, layer]) for layer in range(trace.layers)], axis=1)
    entropy, tokens = evidence.by_document(entropy), evidence.by_document(trace.lengths)
    slope = profile_slope(entropy, tokens, threshold=0.0, rng=rng)
    best = cheapest_within_bounds(evidence.emad_sweep, evidence.full_loss.perplexity)
    if best is None or best.net_reduction <= 0:  # probes that never fire cost more than they save
        return Flatness(evidence.name, evidence.corpus, slope, 0.0, "no margin", len(tokens))
    return Flatness(evidence.name, evidence.corpus, slope, best.net_reduction, best.point.name, len(tokens))


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
