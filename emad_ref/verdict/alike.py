"""Units that are all alike, or all but a few: there is no spread to resample, and yet something is known."""

from __future__ import annotations

import math

import numpy as np
from scipy import special, stats

from emad_ref.verdict.interval import Estimate

UNLIKE = 0.1  # share of units that n must exclude before units that are all alike say anything of the others


def alike(
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
    unlike = min(UNLIKE, abs(gap) / farthest) if farthest > 0 else UNLIKE
    shown = float(stats.binom.cdf(differing, shown_by, unlike))
    above, below = (1.0, shown) if gap > 0 else (shown, 1.0)
    return Estimate(value, common - reach, common + reach, counted, above, below, unit, rest, noun)
