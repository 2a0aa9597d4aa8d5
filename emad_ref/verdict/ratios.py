"""A ratio of two paired sums: it exceeds θ exactly where the mean of a − θ·b exceeds 0 (Fieller 1954)."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from emad_ref.record import Floats
from emad_ref.verdict.alike import UNLIKE


def fieller(a: Floats, b: Floats, t: float, inflation: float = 1.0) -> tuple[float, float]:
    """θ with |mean(a − θ b)| ≤ t standard errors: between the roots of a quadratic.

    ``inflation``: factor of squared standard errors.

    0 where the mean of a, ∞ where that of b is not shown to be positive.
    """
    (var_a, both), (_, var_b) = np.cov(a, b) * inflation * t**2 / len(a)
    curve, middle, end = b.mean() ** 2 - var_b, a.mean() * b.mean() - both, a.mean() ** 2 - var_a
    reach = middle + math.sqrt(max(0.0, middle**2 - curve * end))
    return float(end / reach) if end > 0 else 0.0, float(reach / curve) if curve > 0 else math.inf


def p_positive(values: Floats, inflation: float = 1.0) -> float:
    """That the mean is not positive; of values all alike as in ``alike``. ``inflation`` as in ``fieller``."""
    if np.ptp(values) == 0:
        return float((1 - UNLIKE) ** len(values)) if values[0] > 0 else 1.0
    n = len(values)
    error = float(values.std(ddof=1)) * math.sqrt(inflation / n)
    return float(special.stdtr(n - 1, -values.mean() / error))
