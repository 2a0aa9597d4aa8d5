"""Simulated items and timed requests of known truth, for the cases of claims about a pair."""

from __future__ import annotations

import numpy as np

from pytest_emad.claims.pair_answers import TimedArm
from pytest_emad.statistics.units import ByItem, ByPair


def right(rng: np.random.Generator, items: int, accuracy: float, lost: float, gained: float) -> tuple[ByItem, ByItem]:
    """Return which items a reference and a candidate get right: the candidate loses a share ``lost`` of the reference's
    right items and gains a share ``gained`` of its wrong ones."""
    reference = rng.random(items) < accuracy
    change = rng.random(items)
    return ByItem.from_independent_items(reference), ByItem.from_independent_items(
        np.where(reference, change >= lost, change < gained)
    )


def seconds(rng: np.random.Generator, ratios: dict[str, float], pairs: int = 40) -> dict[str, ByPair]:
    """Map each arm to seconds: the request's length times the arm's share, each measured with 10 % noise."""
    length = rng.uniform(0.5, 2.0, pairs)
    return {arm: ByPair(length * ratio * np.exp(0.1 * rng.standard_normal(pairs))) for arm, ratio in ratios.items()}


def raced(
    rng: np.random.Generator,
    times: dict[str, float],
    work: dict[str, float],
    accepted: dict[str, float] | None = None,
    pairs: int = 40,
) -> dict[str, TimedArm]:
    """Make arms with these proportions of ``times`` and ``work``; ``accepted``: mean acceptance of drafting arms."""
    spent, rates = seconds(rng, work, pairs), accepted or {}

    def drafted(arm: str) -> tuple[float, ...]:
        return tuple(rng.uniform(rates[arm] - 0.1, rates[arm] + 0.1, pairs)) if arm in rates else ()

    return {arm: TimedArm(column, spent.get(arm), drafted(arm)) for arm, column in seconds(rng, times, pairs).items()}


def covers(leg, truth: float) -> None:
    """Check: the leg reports, and its interval, doubled in width, contains the true number.

    A plain 95 % interval misses one time in twenty, and dozens are checked.
    """
    assert leg.outcome == "measured"
    assert leg.interval is not None, leg
    low, high = (2 * bound - leg.estimate for bound in leg.interval)
    assert low < truth < high, f"{leg.name}: {leg.estimate} {leg.interval} misses {truth}"
