"""p-values by betting: what Hoeffding–Bentkus cannot see, that losses vary little (Waudby-Smith & Ramdas, 2010.09686).

Whoever doubts "the risk is at least m" bets against it, document after document, at odds that are fair if it is m:

    K_t = Π_{i ≤ t} (1 + λ_i·(m − x_i)),    p = min(1, 1 / max_t K_t)

x_i in [0, 1] is the loss of document i, 0 ≤ λ_i ≤ ¾/(1 − m) the stake, set before x_i is seen. If the risk is m or
more, K is a non-negative supermartingale that starts at 1, so that P(max_t K_t ≥ 1/ε) ≤ ε (Ville): valid at every n,
whatever the distribution in [0, 1]. Stakes are the authors' for a number n of documents that is known beforehand:

    λ_i = √(2·ln(1/ε) / (n·σ̂²_{i−1})),    σ̂²_i = (¼ + Σ_{j ≤ i} (x_j − μ̂_j)²) / (i + 1)
    μ̂_i = (½ + Σ_{j ≤ i} x_j) / (i + 1)

(the predictable plug-in of their section on betting; at most ¾ of what there is stands on one document). The order of
documents has a say: it is that in which they were drawn, one for all thresholds, and nobody chooses it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from emad_ref.record import Floats
from emad_ref.sweep.risk import needed_sequences

MOST = 0.75  # share of what there is, staked on one document at most
POWER = 0.8
DRAWS = 400  # simulated calibration sets: a power of 0.8 to within 0.02
LARGEST = 2**13  # documents; who needs more is told that no practical number would do


def betting(losses: NDArray[np.floating], tolerance: float, level: float) -> Floats:
    """[λ] p-values of "the risk is at least ``tolerance``", from ``losses`` [documents, λ] in [0, 1].

    ``level``: ε at which stakes are set; at any other the p-values are as valid, and need more documents.
    """
    x = np.asarray(losses, dtype=np.float64)
    seen = np.arange(1, len(x) + 1).reshape(-1, *[1] * (x.ndim - 1)) + 1.0
    mean = (0.5 + np.cumsum(x, axis=0)) / seen
    variance = (0.25 + np.cumsum((x - mean) ** 2, axis=0)) / seen
    before = np.concatenate([np.full_like(x[:1], 0.25), variance[:-1]])
    stake = np.minimum(np.sqrt(2 * math.log(1 / level) / (len(x) * before)), MOST / (1 - tolerance))
    capital = np.cumsum(np.log1p(stake * (tolerance - x)), axis=0).max(axis=0)
    return np.asarray(np.exp(-np.maximum(capital, 0.0)), dtype=np.float64)


def power_of(losses: NDArray[np.floating], documents: int, tolerance: float, level: float, *, seed: int = 0) -> float:
    """Share of calibration sets of so many documents, drawn from ``losses`` [n, λ], that certify the last λ.

    All λ before it have to pass too. An estimate: it takes the losses seen for all there are.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(losses), size=(documents, DRAWS))
    for column in losses.T[::-1]:  # the last first: who fails it has no need of the others
        drawn = drawn[:, betting(column[drawn], tolerance, level) <= level]
    return float(drawn.shape[1] / DRAWS)


def needed_documents(losses: NDArray[np.floating], tolerance: float, level: float, *, seed: int = 0) -> int | None:
    """About how many documents certify the last λ of ``losses`` [n, λ] in 80 % of draws; None: not 8,192, or never.

    By doubling, then bisection in steps of 2 %. No test could do with fewer than (1 − m)ⁿ ≤ ε.
    """
    if losses.mean(axis=0).max() >= tolerance:
        return None

    def enough(documents: int) -> bool:
        return power_of(losses, documents, tolerance, level, seed=seed) >= POWER

    low = high = needed_sequences(tolerance, level)
    while not enough(high):
        low, high = high, 2 * high
        if high > LARGEST:
            return None
    while high > 1.02 * low + 1:
        middle = math.isqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
