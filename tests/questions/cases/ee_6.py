"""Ranks that halve, or double, from layer to layer."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.early_exit_readings import ExitReadings
from emad_ref.measurements.early_exits import LayerReadings
from tests.questions.cases.ee_5 import items
from tests.questions.simulated_exits import near
from tests.questions.simulation import Case

LAYERS = 4


def reading(rng: np.random.Generator, doublings: int) -> LayerReadings:
    """Rank 2^(a + doublings·ℓ), one a in five for each token; of its item two values of a, so that items differ."""
    item = items(rng)
    low = rng.integers(0, 2, item.max() + 1)[item] + rng.integers(0, 2, len(item))
    layer = np.arange(LAYERS) if doublings > 0 else np.arange(LAYERS)[::-1]
    ranks = 2 ** (low[:, None] + layer)
    return LayerReadings(
        item, np.arange(item.max() + 1), ranks, np.zeros(ranks.shape), np.zeros(ranks.shape, dtype=bool), {}
    )


def case(name: str, doublings: int, medians: tuple[int, ...]) -> Case:
    """The middle of a = 0, 1, 1, 2 is 1: the median rank is 2 where the smallest is 1."""
    truths = {"task: slope of log2 rank": float(doublings)}
    truths |= {f"task, layer {n}: median": float(rank) for n, rank in enumerate(medians, 1)}
    return Case(
        name, "value", lambda rng: ExitReadings({"task": reading(rng, doublings)}), draws=5, check=near(truths, 1e-9)
    )


CASES = [
    case("ranks halve", -1, (16, 8, 4, 2)),
    case("ranks double", 1, (2, 4, 8, 16)),
]
