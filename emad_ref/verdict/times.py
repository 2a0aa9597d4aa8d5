"""Seconds in pairs: how many times faster, pair by pair or on the whole mix; and counted work, which has no noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy import special

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.verdict.alike import alike
from emad_ref.verdict.columns import column_of, require_paired
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.ratios import fieller, p_positive
from emad_ref.verdict.steadiness import Steadiness, interruptions, steadiness
from emad_ref.verdict.units import ByPair

BLOCKS = (32, 16, 8)  # of time that a run is cut into, each of two pairs or more
PLANNED_INFLATION = 3.0  # of squared errors, with BLOCKS[-1] blocks: what a verdict asks for on a steady machine


def log_ratio(times_a: ByPair, times_b: ByPair, *, threshold: float = 1.0, level: float = 0.95) -> Estimate:
    """How many times faster b is than a: exp of the mean of log(a_i / b_i), every request counted alike.

    The error is that of ``total_ratio``: a t test on pairs and on blocks of time, the least sure of them, and allowance
    for a machine that was not steady.

    Args:
        times_a: [pairs] seconds of the baseline, in the order in which they were taken.
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
        return _single(ratio, unit)
    if np.ptp(logs) <= 8 * np.finfo(np.float64).eps * max(1.0, np.abs(logs).max()):
        return _same_ratio(ratio, n, threshold, level, unit)
    found, away = steadiness(a, b), math.log(threshold)
    looks = [logs, *(_block_sums(logs, blocks) / _block_sums(np.ones(n), blocks) for blocks in _blocks(n))]
    reaches = [
        float(special.stdtrit(len(look) - 1, (1 + level) / 2))
        * look.std(ddof=1)
        * math.sqrt(found.inflation / len(look))
        for look in looks
    ]
    low, high = (float(np.exp(logs.mean() + side * max(reaches))) for side in (-1, 1))
    above, below = (
        max(p_positive(sign * (look - away), found.inflation) for look in looks) for sign in (1, -1)
    )  # fmt: skip
    method = "paired t on log ratios, of pairs and of blocks of time"
    return Estimate(ratio, low, high, n, above, below, unit, method, ByPair.noun, unsteady=found.unsteady)


def total_ratio(times_a: ByPair, times_b: ByPair, *, threshold: float = 1.0, level: float = 0.95) -> Estimate:
    """How many times faster b is than a on the whole mix of requests: Σ a_i / Σ b_i, with Fieller's interval.

    The ratio exceeds θ exactly where the mean of a_i − θ b_i exceeds 0, which a paired t test decides; the interval
    holds every θ that it does not reject (Fieller 1954). Long requests weigh as much as they last, other than in
    ``log_ratio``, where every request counts the same. Pairs are requests that differ in length: a_i and b_i share that
    and their differences do not, so that the t test fits where the times themselves are far from normal.

    What is independent is a block of time, not a pair: neighbours share the machine's moods. The same test is made on
    the totals of 32, 16 and 8 blocks of pairs that follow one another, with one degree of freedom less than there are
    blocks, and on those of each process where pairs were timed in several. Neither bound nor p-value is ever surer than
    the least sure of them, and all allow for what ``steadiness`` finds of the machine and for what it cannot find.

    A pair of which one arm takes far longer than all others lead to expect was interrupted, or the arm is slow at
    times. Where both arms were struck about as often, such pairs are set aside, and ``note`` has the ratio of all.
    Where one was struck significantly more often, the arm is slow: every pair counts. In between the times do not tell,
    and each side of the verdict does without the pairs that favour it (``Interruptions.counted``).

    Args:
        times_a: [pairs] seconds of the baseline, in the order in which they were taken.
        times_b: [pairs] seconds of the candidate, for the same request in the same pair, of the same processes.
        threshold: the ratio to compare with, > 0.

    Raises:
        BadArgument: shapes or processes differ, no pair, a time that is not positive and finite, or a threshold ≤ 0.
    """
    a, b = _times(times_a, times_b, threshold)
    n, unit = len(a), "× as fast in total"
    every = float(a.sum() / b.sum())
    if n == 1:
        return _single(every, unit)
    if np.abs(a - every * b).max() <= 8 * np.finfo(np.float64).eps * a.max():
        return _same_ratio(every, n, threshold, level, unit)
    struck = interruptions(a, b)
    counted, above_by, below_by = struck.counted
    found = steadiness(a[~struck.either], b[~struck.either])
    low, high, above, below = _least_sure(times_a.among(above_by), times_b.among(above_by), found, threshold, level)
    if below_by is not above_by:
        _, high, _, below = _least_sure(times_a.among(below_by), times_b.among(below_by), found, threshold, level)
    ratio = float(a[counted].sum() / b[counted].sum())
    processes = f" and {times_a.processes} processes" if times_a.processes > 1 else ""
    return Estimate(
        ratio,
        low,
        high,
        n,
        above,
        below,
        unit,
        f"t on a − θ·b over pairs, blocks of time{processes}, the least sure of them (Fieller)",
        ByPair.noun,
        unsteady=found.unsteady,
        note=struck.note(every),
    )


def _least_sure(
    times_a: ByPair, times_b: ByPair, found: Steadiness, threshold: float, level: float
) -> tuple[float, float, float, float]:
    """(low, high, p_above, p_below), the worst of each over pairs, blocks of time and processes."""
    a, b = (np.asarray(column.values, dtype=np.float64) for column in (times_a, times_b))
    looks = [(a, b), *((_block_sums(a, blocks), _block_sums(b, blocks)) for blocks in _blocks(len(a)))]
    if times_a.processes > 1:
        looks.append((times_a.independent, times_b.independent))
    lows, highs, above, below = zip(
        *(_looked_at(*look, found.inflation, threshold, level) for look in looks), strict=True
    )
    return min(lows), max(highs), max(above), max(below)


def _blocks(pairs: int) -> list[int]:
    return [blocks for blocks in BLOCKS if pairs >= 2 * blocks]


def _block_sums(values: Floats, blocks: int) -> Floats:
    """[blocks] sums of values [n] that follow one another, of n / blocks each."""
    starts = np.linspace(0, len(values), blocks, endpoint=False).round().astype(np.intp)
    return np.add.reduceat(values, starts)


def _looked_at(
    a: Floats, b: Floats, inflation: float, threshold: float, level: float
) -> tuple[float, float, float, float]:
    """(low, high, p_above, p_below) where each entry of ``a`` and ``b`` is one independent look at the ratio."""
    low, high = fieller(a, b, float(special.stdtrit(len(a) - 1, (1 + level) / 2)), inflation)
    # Ratios further off may fit better where a total is hardly known: the p-value is the largest of theirs.
    above = max(p_positive(a - threshold * b, inflation), p_positive(a, inflation))
    below = max(p_positive(threshold * b - a, inflation), p_positive(b, inflation))
    return low, high, above, below


def work_ratio(work_a: ByPair, work_b: ByPair, *, threshold: float = 1.0, level: float = 0.95) -> Estimate:
    """How many times fewer FLOPs b takes than a on the whole mix of requests: Σ a_i / Σ b_i, with Fieller's interval.

    Work is counted: no machine interrupts it, it drifts with nothing, and requests drawn at random are independent.

    Args:
        work_a, work_b: [pairs] FLOPs of the same requests.
        threshold: the ratio to compare with, > 0.

    Raises:
        BadArgument: as ``total_ratio``.
    """
    a, b = _times(work_a, work_b, threshold)
    ratio, n, unit = float(a.sum() / b.sum()), len(a), "× fewer FLOPs"
    if n == 1:
        return _single(ratio, unit)
    if np.abs(a - ratio * b).max() <= 8 * np.finfo(np.float64).eps * a.max():
        return _same_ratio(ratio, n, threshold, level, unit)
    low, high, above, below = _looked_at(a, b, 1.0, threshold, level)
    return Estimate(ratio, low, high, n, above, below, unit, "paired t on a − θ·b (Fieller)", ByPair.noun)


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
    for name, times in (("times_a", times_a), ("times_b", times_b)):
        _require_times(name, times)
    a, b = column_of("times_a", times_a, ByPair), column_of("times_b", times_b, ByPair)
    require_paired("times_b", times_b, times_a, "times come in pairs")
    if times_a.processes != times_b.processes:
        raise BadArgument("times_b.processes", times_b.processes, str(times_a.processes), "times come in pairs")
    if not (math.isfinite(threshold) and threshold > 0):
        raise BadArgument("threshold", threshold, "a positive ratio")
    return a, b


def _require_times(name: str, times: ByPair) -> None:
    """Raises BadArgument where an entry is no time, and says which."""
    if not isinstance(times, ByPair) or np.ndim(times.values) != 1:
        return  # ``column_of`` says so
    values = np.asarray(times.values, dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(wrong):
        raise BadArgument(
            f"{name}[{wrong[0]}]",
            float(values[wrong[0]]),
            f"a positive, finite number, as all {len(values)} pairs have",
            "a clock or counter that stands still measures nothing",
        )


def _single(ratio: float, unit: str) -> Estimate:
    return Estimate(ratio, 0.0, math.inf, 1, 1.0, 1.0, unit, "one pair has no spread", ByPair.noun)


def _same_ratio(ratio: float, n: int, threshold: float, level: float, unit: str) -> Estimate:
    """Every pair has the same ratio, as of counted work: nothing is known of pairs that were not taken."""
    found = alike(ratio, ratio, 0.0, 0, n, threshold=threshold, level=level, unit=unit, noun=ByPair.noun)
    return replace(found, low=0.0)
