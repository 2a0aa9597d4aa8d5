"""Has a number moved between two runs by more than chance: an interval of the difference, from the two intervals alone.

MOVER, the method of variance estimates recovery (Zou & Donner 2008, Statistics in Medicine 27:1693; for proportions
Newcombe 1998): with d = x₂ − x₁ and intervals [l₁, u₁] and [l₂, u₂] of one level,

    d − √((x₂ − l₂)² + (u₁ − x₁)²)  ≤  θ₂ − θ₁  ≤  d + √((u₂ − x₂)² + (x₁ − l₁)²)

at that level, for estimates that are independent; bounds need not be symmetric. A number moved where this excludes 0:
then each estimate lies outside the other's interval, though the intervals may overlap. To ask that they do not would
find too little (Schenker & Gentleman 2001). Runs on the same documents are not independent but alike, which makes the
interval too wide: then fewer moves are found than there are, never more. Reports do not hold what each document gave,
so nothing better can be had from them. Each number is judged on its own, without correction: of 20 that stand still in
independent runs, one is expected to seem moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BoundedNumber:
    """An estimate with its interval; ``low`` and ``high`` are ±inf where nothing is known of that side."""

    value: float
    low: float
    high: float

    @property
    def _inside(self) -> bool:
        return self.low <= self.value <= self.high


def significant_change(old: BoundedNumber, new: BoundedNumber) -> int:
    """+1 where ``new`` is shown to lie above ``old``, −1 below, 0 where neither is.

    An estimate outside its own interval (a jackknife's, about a less biased centre) gives no distances to its bounds:
    there the intervals must lie apart.
    """
    if not (old._inside and new._inside):
        return int(new.low > old.high) - int(new.high < old.low)
    apart = new.value - old.value
    low = apart - math.hypot(new.value - new.low, old.high - old.value)
    high = apart + math.hypot(new.high - new.value, old.value - old.low)
    return int(low > 0) - int(high < 0)
