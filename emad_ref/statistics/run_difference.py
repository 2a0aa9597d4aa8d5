"""Difference between two runs beyond chance: an interval of the difference, from the two intervals alone.

MOVER, the method of variance estimates recovery (Zou & Donner 2008, Statistics in Medicine 27:1693; for proportions
Newcombe 1998): with d = x₂ − x₁ and intervals [l₁, u₁] and [l₂, u₂] of one level,

    d − √((x₂ − l₂)² + (u₁ − x₁)²)  ≤  θ₂ − θ₁  ≤  d + √((u₂ − x₂)² + (x₁ − l₁)²)

at that level, for independent estimates; bounds need not be symmetric. A number moved if this excludes 0: then each
estimate lies outside the other's interval, though the intervals may overlap. Requiring disjoint intervals would find
too few changes (Schenker & Gentleman 2001). Runs on the same documents are positively dependent, which makes the
interval too wide: fewer moves are reported than there are, never more. Reports do not hold the value of each document,
so no paired test is possible. Numbers are judged without correction: of 20 unchanged numbers in independent runs, one
is expected to seem moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BoundedNumber:
    """An estimate with its interval; ``low`` and ``high`` are ±inf on an unknown side."""

    value: float
    low: float
    high: float

    @property
    def _inside(self) -> bool:
        return self.low <= self.value <= self.high


def significant_change(old: BoundedNumber, new: BoundedNumber) -> int:
    """+1 if ``new`` is shown to lie above ``old``, −1 if below, 0 if neither.

    An estimate outside its own interval (a jackknife's, about a less biased centre) has no distances to its bounds;
    then the intervals must be disjoint.
    """
    if not (old._inside and new._inside):
        return int(new.low > old.high) - int(new.high < old.low)
    apart = new.value - old.value
    low = apart - math.hypot(new.value - new.low, old.high - old.value)
    high = apart + math.hypot(new.high - new.value, old.value - old.low)
    return int(low > 0) - int(high < 0)
