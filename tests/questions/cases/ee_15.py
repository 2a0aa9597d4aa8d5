"""Items that early exits answer a known amount better, or worse, than full depth."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.ee_15 import Found, Scores
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByItem
from tests.questions import simulated_exits
from tests.questions.simulated_exits import near
from tests.questions.simulation import Case


def found(*gained: float):
    """One task per gain, at one minimum layer."""

    def draw(rng: np.random.Generator) -> Found:
        pairs = [simulated_exits.scores(rng, gain) for gain in gained]
        return Found({f"t{i}": Scores(full, {2: early}) for i, (early, full) in enumerate(pairs)})

    return draw


def few(better: int, worse: int):
    """Of 100 items full depth has half solved; exits change only these."""

    def draw(rng: np.random.Generator) -> Found:
        full = np.zeros(100)
        full[:50] = 1.0
        early = full.copy()
        early[50 : 50 + better], early[:worse] = 1.0, 0.0
        return Found({"t0": Scores(ByItem.distinct(full), {2: ByItem.distinct(early)})})

    return draw


def full_depth_is_shown(verdict: Verdict) -> None:
    near({"t0: score at full depth": 0.5}, 0.045)(verdict)  # uniform over 0.4: 4 × 0.115 / √120


CASES = [
    Case("exits gain 3 points", "holds", found(0.03, 0.02), draws=15, check=full_depth_is_shown),
    Case("exits lose 3 points on one task", "fails", found(0.03, -0.03), draws=15),
    Case("exits change nothing on average", "edge", found(0.0), draws=80),
    Case("three items better, three worse", "edge", few(3, 3)),
]
