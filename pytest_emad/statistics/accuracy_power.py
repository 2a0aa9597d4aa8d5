"""Which drop of accuracy a number of items can show, and how many items would decide one, each in four of five samples.

A sample decides if its p-value is at most the level. Its estimate scatters about the true drop D with the standard
error √((s − D²) / n), where s is the mean squared difference per item. Four of five samples lie above the 20th
percentile, so the answer is the drop, or the n, at which that percentile just decides. For right and wrong s is the
share of items that differ: what is lost and gained in equal parts stays, and D comes on top. The exact tail of
``accuracy`` tests the percentile. For scores in between the variance stays, and the normal distribution tests it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from scipy import stats

from pytest_emad.statistics.accuracy import accuracy_drop_pvalues
from pytest_emad.statistics.estimate import LARGEST_N, Z_POWER, Estimate, format_forecast_range
from pytest_emad.statistics.legs import Side

LARGEST = 0.9  # drop or gain: larger ones need no statistics
STEPS = 14  # of a bisection: a drop to a hundredth of a point
FINENESS = 100  # a number of items to one per cent


@dataclass(frozen=True)
class ScoreSpread:
    """Differences of scores between two sides, reference − candidate.

    ``noise``   right or wrong: share of items that are lost and gained in equal parts. In between: variance.
    ``n``       items that count as independent.
    ``exact``   whether scores are right or wrong; the exact tail applies then.
    ``weight``  (Σ w)² / (n Σ w²) of the items' weights; 1 if all weigh the same.
    """

    noise: float
    n: int
    exact: bool
    weight: float = 1.0

    def p_value(self, drop: float, margin: float, side: Side) -> float:
        """p-value, on the ``side`` of the margin, of the sample that four of five exceed if ``drop`` is the truth."""
        error = self._error(drop)
        away = -Z_POWER * error if side == "above" else Z_POWER * error
        estimate = min(1.0, max(-1.0, drop + away))
        if self.exact:
            differing = min(1.0, max(self.noise + abs(drop), abs(estimate)))
            shares = (differing + estimate) / 2, (differing - estimate) / 2
            return accuracy_drop_pvalues(*shares, self.n, threshold=margin)[side == "below"]
        z = (estimate - margin) / error if error else math.copysign(math.inf, estimate - margin)
        if side == "above":
            return float(stats.norm.sf(z))
        # a rare ruined item that no sample shows costs as in `estimate.pvalue_with_unseen_units` with no spread
        return max(float(stats.norm.cdf(z)), (1 - margin) ** self.n)

    def _error(self, drop: float) -> float:
        variance = self.noise + abs(drop) - drop**2 if self.exact else self.noise
        return math.sqrt(max(0.0, variance) / (self.n * self.weight))


@dataclass(frozen=True)
class DetectableDrops:
    """True drops that four of five samples decide; None: no drop does.

    ``falsified``  the smallest drop found to exceed the margin. ``survived``: the largest shown to stay below it.
    """

    falsified: float | None
    survived: float | None


def find_detectable_drops(
    spread: ScoreSpread, margin: float, error_above: float, error_below: float
) -> DetectableDrops:
    """The drops that ``spread.n`` items decide at the levels of falsification and of survival."""

    def falsifies(drop: float) -> bool:
        return spread.p_value(drop, margin, "above") <= error_above

    def survives(drop: float) -> bool:
        return spread.p_value(drop, margin, "below") <= error_below

    above = _bisect(margin, LARGEST, falsifies) if falsifies(LARGEST) else None
    below = _bisect(margin, -LARGEST, survives) if survives(-LARGEST) else None
    return DetectableDrops(above, below)


def _bisect(no: float, yes: float, decides: Callable[[float], bool]) -> float:
    for _ in range(STEPS):
        middle = (no + yes) / 2
        no, yes = (no, middle) if decides(middle) else (middle, yes)
    return yes


@dataclass(frozen=True)
class ItemForecast:
    """Items that decide in four of five samples if the estimate is true; ``fewest``, ``most``: at its interval's ends.

    None: no number does, since the drop is at the margin or the interval holds it.
    """

    items: int | None
    fewest: int | None
    most: int | None

    def __str__(self) -> str:
        if self.items is None:
            return "the estimate is too near the margin for any number of items"
        return (
            f"about {self.items:,} items would decide it in four of five samples if the estimate is true "
            f"({format_forecast_range(self.fewest, self.most)})"
        )


def forecast_items(
    spread: ScoreSpread, estimate: Estimate, margin: float, error_above: float, error_below: float, items: int
) -> ItemForecast:
    """How many items like these would decide ``estimate`` against ``margin``; ``items``: those that there are."""
    above = estimate.value > margin
    error = error_above if above else error_below
    far, near = (estimate.high, estimate.low) if above else (estimate.low, estimate.high)
    numbers = [_items_that_decide(spread, drop, margin, error, above) for drop in (estimate.value, far, near)]
    each = items / spread.n  # items in clusters count as fewer
    return ItemForecast(*(None if number is None else math.ceil(number * each) for number in numbers))


def _items_that_decide(spread: ScoreSpread, drop: float, margin: float, error: float, above: bool) -> int | None:
    if not math.isfinite(drop) or (drop <= margin if above else drop >= margin):
        return None

    def decides(items: int) -> bool:
        return replace(spread, n=items).p_value(drop, margin, "above" if above else "below") <= error

    high = 1
    while not decides(high):
        high *= 2
        if high > LARGEST_N:
            return None
    low = high // 2
    while high - low > max(1, high // FINENESS):
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high
