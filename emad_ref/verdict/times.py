"""Seconds in pairs: how many times faster, pair by pair or on the whole mix."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy import stats

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.verdict.alike import alike
from emad_ref.verdict.columns import column_of, require_paired
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.ratios import fieller, p_positive
from emad_ref.verdict.units import ByPair


def log_ratio(times_a: ByPair, times_b: ByPair, *, threshold: float = 1.0, level: float = 0.95) -> Estimate:
    """How many times faster b is than a: exp of the mean of log(a_i / b_i), with a paired t interval on the logs.

    Args:
        times_a: [pairs] seconds of the baseline.
        times_b: [pairs] seconds of the candidate, measured beside the baseline in the same pair.
        threshold: the ratio to compare with, > 0.

    Raises:
        BadArgument: shapes or processes differ, no pair, a time that is not positive and finite, a threshold ≤ 0; or
            pairs of several processes, of which ``total_ratio`` alone takes account.
    """
    a, b = _times(times_a, times_b, threshold)
    if times_a.processes > 1:
        raise BadArgument("times_a", f"{times_a.processes} processes", "pairs of one process", "take total_ratio")
    logs, n = np.log(a / b), len(a)
    ratio, unit = float(np.exp(logs.mean())), "× as fast"
    if n == 1:
        return Estimate(ratio, 0.0, math.inf, 1, 1.0, 1.0, unit, "one pair has no spread", ByPair.noun)
    if np.ptp(logs) <= 8 * np.finfo(np.float64).eps * max(1.0, np.abs(logs).max()):
        return _same_ratio(ratio, n, threshold, level, unit)
    above = stats.ttest_1samp(logs, math.log(threshold), alternative="greater").pvalue
    low, high = stats.ttest_1samp(logs, 0.0).confidence_interval(level)
    return Estimate(
        ratio,
        float(np.exp(low)),
        float(np.exp(high)),
        n,
        float(above),
        float(1 - above),
        unit,
        "paired t on log ratios",
        ByPair.noun,
    )


def total_ratio(times_a: ByPair, times_b: ByPair, *, threshold: float = 1.0, level: float = 0.95) -> Estimate:
    """How many times faster b is than a on the whole mix of requests: Σ a_i / Σ b_i, with Fieller's interval.

    The ratio exceeds θ exactly where the mean of a_i − θ b_i exceeds 0, which a paired t test decides; the interval
    holds every θ that it does not reject (Fieller 1954). Long requests weigh as much as they last, other than in
    ``log_ratio``, where every request counts the same. Pairs are requests that differ in length: a_i and b_i share that
    and their differences do not, so that the t test fits where the times themselves are far from normal.

    Pairs that were timed in several processes are as many looks at what a process draws once as there are processes:
    the same test on the totals of each, with K − 1 degrees of freedom. Where those happen to lie closer together than
    their pairs would have them, the pairs' own interval stands: neither bound nor p-value is ever surer than theirs.

    Args:
        times_a: [pairs] seconds of the baseline.
        times_b: [pairs] seconds of the candidate, for the same request in the same pair, of the same processes.
        threshold: the ratio to compare with, > 0.

    Raises:
        BadArgument: shapes or processes differ, no pair, a time that is not positive and finite, or a threshold ≤ 0.
    """
    a, b = _times(times_a, times_b, threshold)
    ratio, n, unit = float(a.sum() / b.sum()), len(a), "× as fast in total"
    if n == 1:
        return Estimate(ratio, 0.0, math.inf, 1, 1.0, 1.0, unit, "one pair has no spread", ByPair.noun)
    apart = a - ratio * b
    if np.abs(apart).max() <= 8 * np.finfo(np.float64).eps * a.max():
        return _same_ratio(ratio, n, threshold, level, unit)
    looks, method = [(a, b)], "paired t on a − θ·b (Fieller)"
    if times_a.processes > 1:
        looks.append((times_a.independent, times_b.independent))
        method = f"t on a − θ·b over {times_a.processes} processes, never surer than over pairs (Fieller)"
    lows, highs, above, below = zip(*(_looked_at(*look, threshold, level) for look in looks), strict=True)
    return Estimate(ratio, min(lows), max(highs), n, max(above), max(below), unit, method, ByPair.noun)


def _looked_at(a: Floats, b: Floats, threshold: float, level: float) -> tuple[float, float, float, float]:
    """(low, high, p_above, p_below) where each entry of ``a`` and ``b`` is one independent look at the ratio."""
    low, high = fieller(a, b, float(stats.t.ppf((1 + level) / 2, len(a) - 1)))
    # Ratios further off may fit better where a total is hardly known: the p-value is the largest of theirs.
    above = max(p_positive(a - threshold * b), p_positive(a))
    below = max(p_positive(threshold * b - a), p_positive(b))
    return low, high, above, below


def ratio_within(
    a: ByPair, b: ByPair, off_a: ByPair, off_b: ByPair, *, threshold: float = 1.0, level: float = 0.95
) -> Estimate:
    """``total_ratio`` of what an instrument may be off by, the same way in every pair at worst.

    Each bound and p-value is that of the worst case for it: everything of a too high and of b too low, or the other way
    round. ``off_a``, ``off_b`` [pairs]: by what share, 0 ≤ share < 1.

    Raises:
        BadArgument: as ``total_ratio``; shares outside 0–1.
    """
    shares = {"off_a": column_of("off_a", off_a, ByPair), "off_b": column_of("off_b", off_b, ByPair)}
    for name, share in shares.items():
        if not ((share >= 0) & (share < 1)).all():
            raise BadArgument(name, float(share.max()), "shares in 0–1, below 1", "lengthen the windows")
    exact = total_ratio(a, b, threshold=threshold, level=level)

    def off(sign: int) -> Estimate:
        numerator, denominator = a.values * (1 + sign * off_a.values), b.values * (1 - sign * off_b.values)
        return total_ratio(a.like(numerator), b.like(denominator), threshold=threshold, level=level)

    least, most = off(-1), off(+1)
    method = f"{exact.method}, instrument at its worst"
    return replace(exact, low=least.low, high=most.high, p_above=least.p_above, p_below=most.p_below, method=method)


def _times(times_a: ByPair, times_b: ByPair, threshold: float) -> tuple[Floats, Floats]:
    a, b = column_of("times_a", times_a, ByPair), column_of("times_b", times_b, ByPair)
    require_paired("times_b", times_b, times_a, "times come in pairs")
    if times_a.processes != times_b.processes:
        raise BadArgument("times_b.processes", times_b.processes, str(times_a.processes), "times come in pairs")
    for name, times in (("times_a", a), ("times_b", b)):
        if times.min() <= 0:
            raise BadArgument(
                name, float(times.min()), "positive seconds", "a clock that stands still measures nothing"
            )
    if not threshold > 0:
        raise BadArgument("threshold", threshold, "a positive ratio")
    return a, b


def _same_ratio(ratio: float, n: int, threshold: float, level: float, unit: str) -> Estimate:
    """Every pair has the same ratio, as of counted work: nothing is known of pairs that were not taken."""
    found = alike(ratio, ratio, 0.0, 0, n, threshold=threshold, level=level, unit=unit, noun=ByPair.noun)
    return replace(found, low=0.0)
