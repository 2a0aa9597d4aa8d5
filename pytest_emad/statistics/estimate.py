"""Estimates: a value with an interval, and p-values against the threshold of a claim.

    rates     studentised bootstrap over documents: perplexity, entropy, slopes, rank correlation
    accuracy  items lost and gained, retained share, difference of scores
    speedup   seconds: one ratio per pair, one of totals; steadiness of the machine
    units     what is resampled, as types
    fronts    two families at equal FLOPs, saving at a given loss

Every estimate has a two-sided 95 % interval, and two p-values against the caller's threshold, to which ``legs`` applies
Holm's correction. Interval and p-value come from the same distribution: p ≤ 5 % exactly if the one-sided 95 % bound
lies beyond the threshold. One exception: the p-values of a perplexity also pay for documents that no sample shows
(``pvalue_with_unseen_units``), while the interval describes the observed documents.

The resampled unit is the sampled one: documents, items, pairs (``units``); never tokens, which depend on each other.
None of these modules knows a claim, a minimum n or a model.

This module also has three general tools: ``estimate_near_identical_units`` for units with (almost) no spread;
``fieller_interval``, the interval of a ratio of two paired sums (Fieller 1954); and ``holm_adjusted_pvalues``, a
correction for several p-values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special, stats

from emad_ref.absent import Absent
from emad_ref.record import Floats

POWER = 0.8  # of a forecast: the share of fresh samples that should decide
Z_POWER, Z_INTERVAL = (float(stats.norm.ppf(share)) for share in (POWER, 0.975))
LARGEST_N = 10_000_000  # units; if more are needed, the truth is practically at the threshold
_UNSEEN_STEPS = np.linspace(0.0, math.log(1e8), 2049)  # −n·ln(1 − π): beyond the last, p is below any level in use


@dataclass(frozen=True)
class ThresholdDistance:
    """Distance of a value from its threshold, in the unit of the test.

    ``gap``    threshold − value: positive if the value is below.
    ``error``  standard error of the value; 0 if the units show no spread.
    ``worst``  contribution of an unseen unit, in the same unit (``pvalue_with_unseen_units``); None: no p-value
               includes it.
    ``least``  smallest number of units with which a bootstrap can decide on this side.
    ``equal``  whether the effective number n is more than half of the units.
    """

    gap: float
    error: float
    worst: float | None = None
    least: int = 0
    equal: bool = True


@dataclass(frozen=True)
class Estimate:
    """A value, its two-sided interval, and p-values against a threshold.

    ``low``, ``high``  bounds at the requested level; ±inf if the data bound nothing (one document has no spread).
    ``p_above``        p-value of "the effect is at most the threshold": small means shown to be above.
    ``p_below``        p-value of "the effect is at least the threshold": small means shown to be below.
    ``noun``           what ``n`` counts: documents, items, pairs.
    ``unsteady``       of times: why the machine counts as unsteady (``measure_steadiness``), shown if the verdict
                       stays open; None if steady, or without times.
    ``distance``       input of ``needed_sample_size``; None: it uses the p-values.
    ``note``           a remark on the value or its units for readers of any verdict; "" none.
    """

    value: float
    low: float
    high: float
    n: int
    p_above: float
    p_below: float
    unit: str
    method: str
    noun: str
    unsteady: Absent | None = None
    distance: ThresholdDistance | None = None
    note: str = ""


def pvalue_with_unseen_units(base: Callable[[Floats], Floats], gap: float, worst: float, n: float) -> float:
    """p-value of "the mean is at least the threshold" if a rare unit that no sample shows may add ``worst``.

    Assume a share π of all units is ruined and adds ``worst`` each. Then n units contain none with probability (1 −
    π)ⁿ, and the others must have a mean of at least threshold − π·worst. Both must happen, so that

        p = sup over π of (1 − π)ⁿ · base(gap − π·worst)

    is valid for every π. With worst = 1 and a threshold of 1 %, 299 units that show no rise at all give 5 %: the rule
    of three, times the weight of a ruined unit.

    Args:
        base: gaps [k] → p-values [k] of "the mean of units like the observed ones is that far above the value".
        gap: threshold − value.
        n: units, the effective number if their weights differ.
    """
    share = -np.expm1(-_UNSEEN_STEPS / n)
    # π comes from one end of each step and its probability from the other, so the grid never understates p
    return float(min(1.0, (np.exp(-_UNSEEN_STEPS[:-1]) * base(gap - share[1:] * worst)).max()))


def needed_sample_size(estimate: Estimate, error: float) -> int | None:
    """Approximate number of documents or pairs that would decide in four of five samples; None if none would.

    Value and spread are assumed to be the true ones. The distance to the threshold in standard errors grows with √n
    and scatters by one: n · ((z_error + z_0.8) / z_now)². If the p-value pays for unseen units, the result is the
    smallest n whose price leaves that distance.
    """
    return _needed_at_shift(estimate, error, 0.0)


def needed_sample_range(estimate: Estimate, error: float) -> tuple[int | None, int | None]:
    """(Fewest, most) that ``needed_sample_size`` gives at the ends of the 95 % interval; None: no number decides."""
    return _needed_at_shift(estimate, error, Z_INTERVAL), _needed_at_shift(estimate, error, -Z_INTERVAL)


def format_forecast_range(fewest: int | None, most: int | None) -> str:
    """Phrase about a forecast at the ends of the estimate's interval: ``564 to any number at the ends …``."""
    few = f"{fewest:,} " if fewest else ""
    return f"{few}to {f'{most:,}' if most else 'any number'} at the ends of its interval"


def _needed_at_shift(estimate: Estimate, error: float, shift: float) -> int | None:
    """``needed_sample_size`` if the value were ``shift`` standard errors farther from the threshold."""
    distance, n, p = estimate.distance, estimate.n, min(estimate.p_above, estimate.p_below)
    if distance is not None:
        gap = math.copysign(max(0.0, abs(distance.gap) + shift * distance.error), distance.gap)
        number = _needed_by_distance(replace(distance, gap=gap), n, error)
        if number is None or number > n or not p > error:
            return number
        # with a normal distribution this n would decide; this one is skewed
    now = -float(stats.norm.ppf(p)) + shift
    if not now > 0:
        return None
    return max(n, math.ceil(n * ((Z_POWER - float(stats.norm.ppf(error))) / now) ** 2))


def _needed_by_distance(distance: ThresholdDistance, n: int, error: float) -> int | None:
    """As ``needed_sample_size``, by the distance alone."""
    if distance.gap == 0 or not math.isfinite(distance.gap):
        return None
    z = (Z_POWER - float(stats.norm.ppf(error))) * distance.error / abs(distance.gap)
    number = max(n, distance.least, math.ceil(n * z**2))
    if number > LARGEST_N:
        return None
    if distance.gap < 0 or distance.worst is None:
        return number
    worst = distance.worst

    def shown(units: int) -> bool:
        spread = distance.error * math.sqrt(n / units)

        def base(gap: Floats) -> Floats:
            if spread == 0:
                return np.where(gap > 0, 0.0, 1.0)
            return np.asarray(stats.norm.sf(gap / spread), dtype=np.float64)

        return pvalue_with_unseen_units(base, distance.gap - Z_POWER * spread, worst, units) <= error

    low, high = number - 1, number
    while not shown(high):
        low, high = high, 2 * high
        if high > LARGEST_N:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shown(middle) else (middle, high)
    return high


UNSEEN_SHARE = 0.1  # share of units that n must exclude before identical units are evidence about the others


def estimate_near_identical_units(
    value: float,
    common: float,
    away: float,
    differing: int,
    n: int,
    *,
    threshold: float,
    level: float,
    unit: str,
    noun: str,
    counted: int | None = None,
    worst: float = 0.0,
) -> Estimate:
    """Estimate for units that all have one rate, except a few (``differing``).

    The number of other units is bounded, not their size. The bounds are those of the ``common`` rate plus ``away``
    times the largest share that may differ (Clopper–Pearson); ``away`` moves the mean if every unit is like the
    farthest observed one. If none differs, there are no bounds. The p-value towards the common rate's side of the
    threshold is the probability of so few differing units among n if a tenth of all units differs. It assumes fewer if
    fewer units as far away as the farthest would reach the threshold. If none differs this is 0.9ⁿ, so 29 units show it
    at 5 %. Below the threshold the farthest counts as at least ``worst``, the contribution of an unseen unit. A common
    rate at the threshold is a tie and decides nothing; the other side is never shown. ``counted`` is the effective
    number of the ``n`` units, used for all of this; None: all.
    """
    # unequal units with a few differing ones show at least as much as one more than twice as many equal units
    shown_by = n if counted is None else max(counted, 2 * differing + 1)
    counted = n if counted is None else counted
    gap, rest = threshold - common, f"the same in each of {n} {noun}, no spread to resample"
    if differing:
        rest = f"only {differing} of {n} {noun} differ from the others, too few to resample"
    share = float(special.betaincinv(differing + 1, shown_by - differing, (1 + level) / 2))  # differing < n / 2
    reach = share * away if differing else math.inf
    if abs(gap) <= 8 * np.finfo(np.float64).eps * max(abs(common), abs(threshold)):
        return Estimate(value, common - reach, common + reach, counted, 1.0, 1.0, unit, f"tied: {rest}", noun)
    farthest = max(away, worst) if gap > 0 else away
    unlike = min(UNSEEN_SHARE, abs(gap) / farthest) if farthest > 0 else UNSEEN_SHARE
    tail = float(stats.binom.cdf(differing, shown_by, unlike))
    above, below = (1.0, tail) if gap > 0 else (tail, 1.0)
    return Estimate(value, common - reach, common + reach, counted, above, below, unit, rest, noun)


def fieller_interval(a: Floats, b: Floats, t: float, inflation: float = 1.0) -> tuple[float, float]:
    """Bounds of θ with |mean(a − θ b)| ≤ t standard errors: the roots of a quadratic.

    ``inflation``: factor of squared standard errors. The lower bound is 0 if the mean of a is not shown to be positive;
    the upper is ∞ if that of b is not.
    """
    (var_a, both), (_, var_b) = np.cov(a, b) * inflation * t**2 / len(a)
    curve, middle, end = b.mean() ** 2 - var_b, a.mean() * b.mean() - both, a.mean() ** 2 - var_a
    reach = middle + math.sqrt(max(0.0, middle**2 - curve * end))
    return float(end / reach) if end > 0 else 0.0, float(reach / curve) if curve > 0 else math.inf


def positive_mean_pvalue(values: Floats, inflation: float = 1.0) -> float:
    """p-value of "the mean is not positive"; ``inflation`` as in ``fieller_interval``.

    Identical values are treated as in ``estimate_near_identical_units``.
    """
    if np.ptp(values) == 0:
        return float((1 - UNSEEN_SHARE) ** len(values)) if values[0] > 0 else 1.0
    n = len(values)
    error = float(values.std(ddof=1)) * math.sqrt(inflation / n)
    return float(special.stdtr(n - 1, -values.mean() / error))


def holm_adjusted_pvalues(p_values: Sequence[float], others: int = 0) -> list[float]:
    """Holm's adjusted p-values: rejecting those ≤ α keeps the probability of any false rejection ≤ α.

    Args:
        p_values: unadjusted, of these tests.
        others: further tests of the same family with unknown p-values; they count as 1, which is conservative.

    >>> [round(p, 4) for p in holm_adjusted_pvalues([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]

    SciPy has Benjamini–Hochberg but not Holm, and statsmodels would bring pandas and patsy.
    """
    order, adjusted, floor = np.argsort(p_values, kind="stable"), [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) + others - rank) * p_values[index]))
        adjusted[index] = floor
    return adjusted
