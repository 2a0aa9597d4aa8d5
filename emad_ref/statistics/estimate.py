"""What an estimate is: a value with an interval, and how it stands to the threshold that a claim compares it with.

    bootstrap  samples of documents, and intervals from them    rates   sums over tokens: perplexity, entropy, slopes
    alike      units without spread                             shares  items lost and gained: a drop of accuracy
    columns    what is resampled, held against its type         scores  means over items: retained, a difference
    ratios     of two paired sums (Fieller)                     ranks   Spearman's correlation
    holm       of several p-values                              times   seconds: one ratio per pair, one of totals
    steadiness what of paired times is the machine's doing

Every estimate has a two-sided 95 % interval to show, and two p-values against the caller's threshold, so that Holm's
correction can be applied where legs meet (``legs``). Interval and p-value come from the same distribution: p ≤ 5 %
exactly where the one-sided 95 % bound lies beyond the threshold. One exception: the p-values of a perplexity also pay
for documents that no sample shows (``unseen_unit_pvalue``), while the interval describes the documents that were seen.

What is resampled is what was sampled: documents, items, pairs (``units``); never tokens, which depend on each other.
None of these modules knows a claim, a minimum n or a model.

Units that are all alike, or all but a few: there is no spread to resample, and yet something is known.

A ratio of two paired sums: it exceeds θ exactly where the mean of a − θ·b exceeds 0 (Fieller 1954).

Several p-values that share one chance of a false rejection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from emad_ref.record import Floats

LARGEST_N = 10_000_000  # units; where more would be needed the truth is as good as on the threshold
_UNSEEN_STEPS = np.linspace(0.0, math.log(1e8), 2049)  # −n·ln(1 − π): beyond the last, p is below any level in use


@dataclass(frozen=True)
class Distance:
    """How far a value lies from its threshold, in the unit in which it was tested.

    ``gap``    threshold − value: positive where the value lies below.
    ``error``  standard error of the value; 0 where the units show no spread.
    ``worst``  what an unseen unit may add, in the same unit (``unseen_unit_pvalue``); None where that is not paid for.
    ``least``  smallest number of units with which a bootstrap can decide on this side at all.
    ``equal``  whether their effective number, which n is, is more than half of the units.
    """

    gap: float
    error: float
    worst: float | None = None
    least: int = 0
    equal: bool = True


@dataclass(frozen=True)
class Estimate:
    """A value, its two-sided interval, and how it stands to a threshold.

    ``low``, ``high``  bounds at the level asked for; ±inf where the data bound nothing (one document has no spread).
    ``p_above``        p-value of "the effect is at most the threshold": small means shown to be above.
    ``p_below``        p-value of "the effect is at least the threshold": small means shown to be below.
    ``noun``           what ``n`` counts: documents, items, pairs.
    ``unsteady``       of times: how the run shows that its machine was not steady (``steadiness``), said where the
                       verdict is left open; "" where it does not, and of everything that is no time.
    ``distance``       what ``needed_n`` extrapolates; None: it reads the p-values.
    ``note``           what a reader must know of the value or its units whatever is decided; "" nothing.
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
    unsteady: str = ""
    distance: Distance | None = None
    note: str = ""


def unseen_unit_pvalue(base: Callable[[Floats], Floats], gap: float, worst: float, n: float) -> float:
    """p-value of "the mean is at least the threshold" where a rare unit that no sample shows may add ``worst``.

    If a share π of all units is ruined and adds ``worst`` each, n units show none of them with probability (1 − π)ⁿ,
    and the others must have a mean of at least threshold − π·worst. Both have to happen, so that

        p = sup over π of (1 − π)ⁿ · base(gap − π·worst)

    is valid for every π. With worst = 1 and a threshold of 1 %, 299 units that show no rise at all give 5 %: the rule
    of three, times what a ruined unit weighs.

    Args:
        base: gaps [k] → p-values [k] of "the mean of units like those seen lies that far above the value".
        gap: threshold − value.
        n: units, the effective number where their weights differ.
    """
    share = -np.expm1(-_UNSEEN_STEPS / n)
    # π is taken from one end of each step and its chance from the other, so that the grid never understates p
    return float(min(1.0, (np.exp(-_UNSEEN_STEPS[:-1]) * base(gap - share[1:] * worst)).max()))


def needed_n(estimate: Estimate, error: float) -> int | None:
    """About how many documents or pairs would decide, if value and spread stay as they are; None if no number would.

    The distance to the threshold in standard errors grows with √n: n · (z_error / z_now)². Where unseen units are paid
    for, the smallest n whose price leaves that distance.
    """
    distance, n, p = estimate.distance, estimate.n, min(estimate.p_above, estimate.p_below)
    if distance is not None:
        number = _needed_by_distance(distance, n, error)
        if number is None or number > n or not p > error:
            return number
        # a normal mean would be decided by now, and this one, which is skewed, is not
    now = -float(stats.norm.ppf(p))
    if not now > 0:
        return None
    return max(n, math.ceil(n * (-float(stats.norm.ppf(error)) / now) ** 2))


def _needed_by_distance(distance: Distance, n: int, error: float) -> int | None:
    """As ``needed_n``, on the side of the threshold on which the value lies."""
    if distance.gap == 0 or not math.isfinite(distance.gap):
        return None
    z = -float(stats.norm.ppf(error)) * distance.error / abs(distance.gap)
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

        return unseen_unit_pvalue(base, distance.gap, worst, units) <= error

    low, high = number - 1, number
    while not shown(high):
        low, high = high, 2 * high
        if high > LARGEST_N:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shown(middle) else (middle, high)
    return high


UNSEEN_SHARE = 0.1  # share of units that n must exclude before units that are all alike say anything of the others


def identical_units(
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
    """All units but a few (``differing``) have one rate: how many others may differ is known, by how much is not.

    The bounds are those of the ``common`` rate plus ``away`` (how far the farthest one seen moves the mean, were all
    like it) times the largest share that may differ (Clopper–Pearson); where none differs, there are none. The p-value
    towards the common rate's side of the threshold is the chance of so few among n if a tenth of all units differed,
    or fewer where fewer as far as the farthest would reach the threshold: 0.9ⁿ where none differs, so that 29 units
    show it at 5 %. Below the threshold the farthest counts as at least ``worst``, what an unseen unit may add. A common
    rate on the threshold is a tie and shows nothing; the other side is never shown. ``counted``: the effective number
    of the ``n`` units, by which they show all this; None: all.
    """
    # unequal units of which a few differ show at least as much as one more than twice as many equal ones
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
    shown = float(stats.binom.cdf(differing, shown_by, unlike))
    above, below = (1.0, shown) if gap > 0 else (shown, 1.0)
    return Estimate(value, common - reach, common + reach, counted, above, below, unit, rest, noun)


def fieller(a: Floats, b: Floats, t: float, inflation: float = 1.0) -> tuple[float, float]:
    """θ with |mean(a − θ b)| ≤ t standard errors: between the roots of a quadratic.

    ``inflation``: factor of squared standard errors.

    0 where the mean of a, ∞ where that of b is not shown to be positive.
    """
    (var_a, both), (_, var_b) = np.cov(a, b) * inflation * t**2 / len(a)
    curve, middle, end = b.mean() ** 2 - var_b, a.mean() * b.mean() - both, a.mean() ** 2 - var_a
    reach = middle + math.sqrt(max(0.0, middle**2 - curve * end))
    return float(end / reach) if end > 0 else 0.0, float(reach / curve) if curve > 0 else math.inf


def positive_mean_pvalue(values: Floats, inflation: float = 1.0) -> float:
    """That the mean is not positive; of values all alike as in ``alike``. ``inflation`` as in ``fieller``."""
    if np.ptp(values) == 0:
        return float((1 - UNSEEN_SHARE) ** len(values)) if values[0] > 0 else 1.0
    n = len(values)
    error = float(values.std(ddof=1)) * math.sqrt(inflation / n)
    return float(special.stdtr(n - 1, -values.mean() / error))


def holm(p_values: Sequence[float], others: int = 0) -> list[float]:
    """Holm's adjusted p-values: rejecting where they are ≤ α keeps the chance of any false rejection ≤ α.

    Args:
        p_values: unadjusted, of the tests at hand.
        others: further tests of the same family whose p-values are not known here; they count as 1, which is
            conservative.

    >>> [round(p, 4) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]

    Six lines of our own: SciPy has Benjamini–Hochberg but not Holm, and statsmodels would bring pandas and patsy.
    """
    order, adjusted, floor = np.argsort(p_values, kind="stable"), [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) + others - rank) * p_values[index]))
        adjusted[index] = floor
    return adjusted
