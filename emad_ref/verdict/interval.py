"""What an estimate is: a value with an interval, and how it stands to the threshold that a claim compares it with.

    bootstrap  samples of documents, and intervals from them    rates   sums over tokens: perplexity, entropy, slopes
    alike      units without spread                             shares  items lost and gained: a drop of accuracy
    columns    what is resampled, held against its type         scores  means over items: retained, a difference
    ratios     of two paired sums (Fieller)                     ranks   Spearman's correlation
    holm       of several p-values                              times   seconds: one ratio per pair, one of totals
    steadiness what of paired times is the machine's doing

Every estimate has a two-sided 95 % interval to show, and two p-values against the caller's threshold, so that Holm's
correction can be applied where legs meet (``legs``). Interval and p-value come from the same distribution: p ≤ 5 %
exactly where the one-sided 95 % bound lies beyond the threshold.

What is resampled is what was sampled: documents, items, pairs (``units``); never tokens, which depend on each other.
None of these modules knows a claim, a minimum n or a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A value, its two-sided interval, and how it stands to a threshold.

    ``low``, ``high``  bounds at the level asked for; ±inf where the data bound nothing (one document has no spread).
    ``p_above``        p-value of "the effect is at most the threshold": small means shown to be above.
    ``p_below``        p-value of "the effect is at least the threshold": small means shown to be below.
    ``noun``           what ``n`` counts: documents, items, pairs.
    ``note``           what a reader must know of the value whatever is decided; "" nothing.
    ``unsteady``       of times: how the run shows that its machine was not steady (``steadiness``), said where the
                       verdict is left open; "" where it does not, and of everything that is no time.
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
    note: str = ""
    unsteady: str = ""


def needed_n(estimate: Estimate, error: float) -> int | None:
    """About how many documents or pairs would decide, if value and spread stay as they are; None if no number would.

    The distance to the threshold in standard errors grows with √n: n · (z_error / z_now)².
    """
    now = -float(stats.norm.ppf(min(estimate.p_above, estimate.p_below)))
    if not now > 0:
        return None
    return max(estimate.n, math.ceil(estimate.n * (-float(stats.norm.ppf(error)) / now) ** 2))
