"""Choosing EAD's threshold τ: for a share of the large model, or for a score.

From entropies alone: H̄ of the small model on a validation split, and τ the quantile above which the wanted share of
them lies. That is a first guess, since it leaves out d_min, and the large model's own (lower) entropies once it is in
charge. From a table of runs: the row that was measured to hold what is wanted. This module runs no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Floats


@dataclass(frozen=True)
class Routing:
    """One measured run of a pair: τ, the share of tokens the large model emitted, and the score (higher is better)."""

    threshold_bits: float
    large_share: float
    score: float


def threshold_for_share(rolling_bits: Floats, large_share: float) -> float:
    """The largest τ, bits, at which H̄ ≥ τ holds for at least ``large_share`` of ``rolling_bits`` float64 [n].

    At share 0 the smallest number above all of them. Where values tie at τ the share attained is larger.

    >>> threshold_for_share(np.array([0.1, 0.2, 0.9, 1.4]), 0.5)
    0.9

    Raises:
        BadArgument: no or not finite values, a share outside 0–1.
    """
    if not 0 <= large_share <= 1:
        raise BadArgument("large_share", large_share, "a share in 0–1")
    if len(rolling_bits) == 0 or not np.isfinite(rolling_bits).all():
        raise BadArgument("rolling_bits", f"{len(rolling_bits)} values", "at least one, all finite")
    ascending = np.sort(rolling_bits)
    # a share given as a decimal must not need one value more than it says: 0.3 · 10 is not above 3
    above = math.ceil(round(large_share * len(ascending), 9))
    return float(ascending[-above]) if above else math.nextafter(float(ascending[-1]), math.inf)


def best_within_share(table: Sequence[Routing], large_share: float) -> Routing | None:
    """The row of highest score that uses the large model for at most ``large_share``; None where none does."""
    affordable = [row for row in table if row.large_share <= large_share]
    return max(affordable, key=lambda row: row.score, default=None)
