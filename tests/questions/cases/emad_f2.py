"""Pairs of requests whose true ratio of times is known; a pair shares its prompt and the mood of the machine."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_f2 import Found, Timed
from emad_ref.verdict.units import ByPair
from tests.questions.simulation import Case

PAIRS, NOISE = 30, 0.05


def timed(*ratios: float, generate: float = 0.9):
    """Per batch size, the point ``ratio`` times as fast as full depth, and ``generate`` as said, on average of logs."""

    def found(rng: np.random.Generator) -> Found:
        batches = {}
        for batch, ratio in enumerate(ratios, start=1):
            mood = 0.2 * np.exp(0.3 * rng.standard_normal(PAIRS))
            full, point, own = (mood * np.exp(NOISE * rng.standard_normal(PAIRS)) / r for r in (1.0, ratio, generate))
            batches[batch] = Timed(ByPair(full), ByPair(point), ByPair(own))
        return Found(batches)

    return found


CASES = [
    Case("a third faster", "holds", timed(1.33, 1.3), draws=30),
    Case(
        "faster than generate, which is as fast as full depth", "holds", timed(1.3, generate=1.0), draws=30, least=0.8
    ),
    Case("as fast", "fails", timed(1.0), draws=30),
    Case("faster in batches of one alone", "fails", timed(1.33, 1.0), draws=30),
    Case("faster by the threshold", "edge", timed(1.1), draws=200),
    Case("nothing was timed", "premise", timed()),
]
