"""Tokens that are decisive, the small model's, and wrong, each with a known chance that differs from item to item."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.ead_a3 import DecisiveTokenEvidence
from emad_ref.statistics.units import ByItem
from tests.questions.cases.answered import covers
from tests.questions.simulation import Case


def tokens(decisive: float, small: float, wrong: float, calm_wrong: float, items: int = 100):
    """Items of 20 to 60 tokens; an item's own chance of error is up to twice the mean, or none."""

    def found(rng: np.random.Generator) -> DecisiveTokenEvidence:
        length, difficulty = rng.integers(20, 60, items), rng.uniform(0, 2, items)
        high = rng.binomial(length, decisive)
        high_small, calm = rng.binomial(high, small), rng.binomial(length - high, small)
        return DecisiveTokenEvidence(
            "task, rule",
            *map(ByItem.distinct, (high, high_small, rng.binomial(high_small, wrong * difficulty))),
            ByItem.distinct(calm),
            ByItem.distinct(rng.binomial(calm, calm_wrong * difficulty)),
        )

    return found


def says(*shares: float):
    def check(verdict) -> None:
        for leg, share in zip(verdict.legs, shares, strict=True):
            covers(leg, share)

    return check


def none_and_all_alike(verdict) -> None:
    """No decisive token at all; of the others, none is wrong in any item."""
    first, second, third = verdict.legs
    assert (first.estimate, first.n, first.reason) == (None, 0, "there is no such token")
    assert second.estimate is None
    assert (third.estimate, third.interval) == (0.0, None)
    assert "no spread" in third.reason


CASES = [
    Case("half of the decisive tokens, often wrong", "value", tokens(0.3, 0.5, 0.4, 0.1), 5, check=says(0.5, 0.4, 0.1)),
    Case("few of them, seldom wrong", "value", tokens(0.5, 0.2, 0.1, 0.3), 5, check=says(0.2, 0.1, 0.3)),
    Case("no decisive token", "value", tokens(0.0, 1.0, 0.0, 0.0), check=none_and_all_alike),
]
