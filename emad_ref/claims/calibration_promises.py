"""What EE-7 and EMAD-X2 share: a promise about calibration sets, and how many of them are shown to have kept it.

A promise P(risk ≤ δ) ≥ 1 − ε is about sets drawn anew, so sets are the unit, and no two share a member. Each has chosen
a threshold; what that risks is known from a pool which no set has a member of. A set has broken the promise where its
choice is shown to risk more than δ there, and kept it where it is shown to risk less, or chose full depth; what the
pool leaves open counts against either verdict, and so does the chance that the pool misleads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from scipy import stats

from emad_ref.record import Bools, Floats
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import LEVEL, LegTest, leg_test
from emad_ref.sweep.risk import hoeffding_bentkus

MISLED = 0.01  # chance, over pools, that any threshold is taken for another than it is
NOUN = "calibration sets"


def risk_shown(pool: Floats, delta: float) -> tuple[Bools, Bools]:
    """(shown to risk more than ``delta``, shown to risk less), [λ] each, of independent losses [n, λ] in 0–1.

    Hoeffding–Bentkus on either side, for the mean of 1 − loss against 1 − δ is the same question asked the other way.
    """
    n, error = len(pool), MISLED / (2 * pool.shape[1])
    risky = hoeffding_bentkus((1 - pool).sum(axis=0), n, 1 - delta)
    safe = hoeffding_bentkus(pool.sum(axis=0), n, delta)
    return risky <= error, safe <= error


def set_share_leg(
    name: str,
    sets: int,
    *,
    sure: int,
    not_so: int,
    seen: int,
    least: float,
    unit: str,
    minimum: Mapping[str, int],
    misled: float = MISLED,
) -> LegTest:
    """A leg for the share of ``sets`` that did something, against ``least``: exact binomial tests.

    Args:
        sure: sets that are shown to have done it; ``not_so``: shown not to have; ``seen``: that look as if they did.
        misled: chance that any of this is shown wrongly.
    """
    open_at_most = sets - not_so
    low = stats.binomtest(sure, sets, least, alternative="greater")
    high = stats.binomtest(open_at_most, sets, least, alternative="less")
    estimate = Estimate(
        seen / sets,
        float(stats.binomtest(sure, sets).proportion_ci(0.95, method="exact").low),
        float(stats.binomtest(open_at_most, sets).proportion_ci(0.95, method="exact").high),
        sets,
        min(1.0, float(low.pvalue) + misled),
        min(1.0, float(high.pvalue) + misled),
        unit,
        f"Clopper–Pearson over {NOUN}" + (", of those whose risk the pool shows" if misled else ""),
        NOUN,
    )
    tested = leg_test(name, estimate, "below", least, minimum)
    return LegTest(tested.leg, NOUN, lambda error: needed_sets(least, misled))


def needed_sets(least: float, misled: float = MISLED) -> int:
    """The fewest sets that can show a share of ``least``: all of them do it.

    >>> needed_sets(0.95)
    63
    """
    return math.ceil(math.log(LEVEL - misled) / math.log(least))
