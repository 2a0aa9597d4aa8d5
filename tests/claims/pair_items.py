"""Simulated items and timed requests of known truth, for the cases of claims about a pair."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.pair_answers import TimedArm
from emad_ref.statistics.units import ByItem, ByPair


def right(rng: np.random.Generator, items: int, accuracy: float, lost: float, gained: float) -> tuple[ByItem, ByItem]:
    """Right by a reference and by a candidate, which loses a share ``lost`` of what the reference gets right and gains
    a share ``gained`` of what it does not."""
    reference = rng.random(items) < accuracy
    change = rng.random(items)
    return ByItem.from_independent_items(reference), ByItem.from_independent_items(
        np.where(reference, change >= lost, change < gained)
    )


def seconds(rng: np.random.Generator, ratios: dict[str, float], pairs: int = 40) -> dict[str, ByPair]:
    """Arm → seconds: a request's own length times the arm's share of it, each measured with 10 % of noise."""
    length = rng.uniform(0.5, 2.0, pairs)
    return {arm: ByPair(length * ratio * np.exp(0.1 * rng.standard_normal(pairs))) for arm, ratio in ratios.items()}


def raced(
    rng: np.random.Generator,
    times: dict[str, float],
    work: dict[str, float],
    accepted: dict[str, float] | None = None,
    pairs: int = 40,
) -> dict[str, TimedArm]:
    """Arms whose ``times`` and ``work`` stand in these proportions; ``accepted``: mean acceptance of those drafting."""
    spent, rates = seconds(rng, work, pairs), accepted or {}

    def drafted(arm: str) -> tuple[float, ...]:
        return tuple(rng.uniform(rates[arm] - 0.1, rates[arm] + 0.1, pairs)) if arm in rates else ()

    return {arm: TimedArm(column, spent.get(arm), drafted(arm)) for arm, column in seconds(rng, times, pairs).items()}


def covers(leg, truth: float) -> None:
    """The leg reports, and its interval, twice as wide, holds the true number.

    As it is, a 95 % interval would miss one time in twenty, and dozens are looked at.
    """
    assert leg.outcome == "measured"
    assert leg.interval is not None, leg
    low, high = (2 * bound - leg.estimate for bound in leg.interval)
    assert low < truth < high, f"{leg.name}: {leg.estimate} {leg.interval} misses {truth}"
