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
for documents that no sample shows (``priced``), while the interval describes the documents that were seen.

What is resampled is what was sampled: documents, items, pairs (``units``); never tokens, which depend on each other.
None of these modules knows a claim, a minimum n or a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from emad_ref.record import Floats

LARGEST_N = 10_000_000  # units; where more would be needed the truth is as good as on the threshold
_STEPS = np.linspace(0.0, math.log(1e8), 2049)  # −n·ln(1 − π): beyond the last, p is below any level in use


@dataclass(frozen=True)
class Distance:
    """How far a value lies from its threshold, in the unit in which it was tested.

    ``gap``    threshold − value: positive where the value lies below.
    ``error``  standard error of the value; 0 where the units show no spread.
    ``worst``  what an unseen unit may add, in the same unit (``priced``); None where that is not paid for.
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


def priced(base: Callable[[Floats], Floats], gap: float, worst: float, n: float) -> float:
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
    share = -np.expm1(-_STEPS / n)
    # π is taken from one end of each step and its chance from the other, so that the grid never understates p
    return float(min(1.0, (np.exp(-_STEPS[:-1]) * base(gap - share[1:] * worst)).max()))


def needed_n(estimate: Estimate, error: float) -> int | None:
    """About how many documents or pairs would decide, if value and spread stay as they are; None if no number would.

    The distance to the threshold in standard errors grows with √n: n · (z_error / z_now)². Where unseen units are paid
    for, the smallest n whose price leaves that distance.
    """
    distance, n, p = estimate.distance, estimate.n, min(estimate.p_above, estimate.p_below)
    if distance is not None:
        number = _needed(distance, n, error)
        if number is None or number > n or not p > error:
            return number
        # a normal mean would be decided by now, and this one, which is skewed, is not
    now = -float(stats.norm.ppf(p))
    if not now > 0:
        return None
    return max(n, math.ceil(n * (-float(stats.norm.ppf(error)) / now) ** 2))


def _needed(distance: Distance, n: int, error: float) -> int | None:
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

        return priced(base, distance.gap, worst, units) <= error

    low, high = number - 1, number
    while not shown(high):
        low, high = high, 2 * high
        if high > LARGEST_N:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shown(middle) else (middle, high)
    return high
