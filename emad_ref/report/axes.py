"""From values to places in a drawing: linear axes, and one for rises that keeps the good region large.

A drawing is laid out twice, for a desk and for a phone, so that letters have one size on both; ``Frame`` is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

TICKS = 5
GOOD_PART = 2.0  # of the rise's axis: the part up to the threshold is as high as so many decades above it


@dataclass(frozen=True)
class Frame:
    """Width and height of a drawing in CSS pixels, and what is left free around the axes."""

    width: int
    height: int
    left: int
    right: int
    top: int = 14
    bottom: int = 46

    @property
    def across(self) -> int:
        return self.width - self.left - self.right

    @property
    def up(self) -> int:
        return self.height - self.top - self.bottom


DESK, PHONE = Frame(760, 380, 64, 170), Frame(340, 300, 52, 12)
FRAMES = {"desk": DESK, "phone": PHONE}


@dataclass(frozen=True)
class Axis:
    """``place``: value → pixels from the left or the top; ``ticks`` (pixels, text)."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def linear(low: float, high: float, start: float, end: float, text: Callable[[float], str]) -> Axis:
    """From ``low`` at pixel ``start`` to ``high`` at ``end``, with round ticks."""
    spread = high - low or 1.0

    def place(value: float) -> float:
        return round(start + (value - low) / spread * (end - start), 1)

    step = _round_step(spread / TICKS)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return Axis(place, [(place(tick * step), text(tick * step)) for tick in range(first, last + 1)])


def rises(low: float, high: float, threshold: float, start: float, end: float, text: Callable[[float], str]) -> Axis:
    """Linear up to ``threshold``, logarithmic above: rules differ by orders of magnitude."""

    def height(value: float) -> float:
        share = value / threshold
        return GOOD_PART * share if share <= 1 else GOOD_PART + math.log10(share)

    spread = height(high) - height(low)

    def place(value: float) -> float:
        return round(start + (height(value) - height(low)) / spread * (end - start), 1)

    above = [threshold * 10**decade for decade in range(1, 9) if threshold * 10**decade <= high]
    return Axis(place, [(place(tick), text(tick)) for tick in (0.0, threshold / 2, threshold, *above)])


def apart(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Heights of labels, as near to ``places`` as they can be without touching, between ``low`` and ``high``."""
    order = sorted(range(len(places)), key=lambda at: places[at])
    found = [0.0] * len(places)
    before = low - gap
    for at in order:
        before = found[at] = max(places[at], before + gap)
    after = high + gap
    for at in reversed(order):
        after = found[at] = min(found[at], after - gap)
    return [round(each, 1) for each in found]


def _round_step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if rough <= step * power * (1 + 1e-9))
