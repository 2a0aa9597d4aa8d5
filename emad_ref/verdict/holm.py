"""Several p-values that share one chance of a false rejection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
