"""Calibration sets that keep their promise with a known probability; and losses for which the promise is a theorem."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.ee_7 import DRAWS, THRESHOLDS, Found, Promise, promised
from emad_ref.sweep.risk import Coverage
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByItem
from tests.questions.simulated_exits import leg_by_name
from tests.questions.simulation import Case, asked

ITEMS, LAYERS = 150, 8
LOSSES = ByItem.distinct(np.zeros((ITEMS, len(THRESHOLDS))))
MEAN_EXIT = np.array([7.0, 6.0, 5.0, 4.0])


def kept(*probability: float):
    """One task per probability with which a set's choice keeps its promise."""

    def draw(rng: np.random.Generator) -> Found:
        return Found(
            {
                f"task {i}": Promise(LOSSES, MEAN_EXIT, Coverage(rng.binomial(DRAWS, p) / DRAWS, 1.0, 2.0, DRAWS))
                for i, p in enumerate(probability)
            }
        )

    return draw


def calibrated(rng: np.random.Generator) -> Found:
    """Real thresholds on real losses: each item differs from full depth or does not, the looser the oftener."""
    losses = ByItem.distinct((rng.random(ITEMS)[:, None] < np.array([0.0, 0.02, 0.15, 0.5])).astype(float))
    return Found({"task 0": promised(losses, MEAN_EXIT, LAYERS, asked("EE-7", rng))})


def safe_and_useful(verdict: Verdict) -> None:
    legs = leg_by_name(verdict)
    assert legs["task 0: sets that chose any exit"].estimate == 1.0, "without a loss the strictest always passes"
    saved = legs["task 0: blocks saved per token"].estimate
    assert saved is not None
    assert 1.0 <= saved <= 2.5, "λ = 0.9 saves two blocks and passes often; 0.7 loses more than is tolerated"
    assert abs((legs["task 0, λ=0.4: difference from full depth"].estimate or 0.0) - 0.5) <= 0.17  # 4 × 0.5 / √150


CASES = [
    Case("99 of 100 sets keep it", "holds", kept(0.99, 0.995), draws=20),
    Case("nine of ten sets keep it", "fails", kept(0.99, 0.9), draws=20, least=0.9),
    Case("19 of 20 sets keep it", "edge", kept(0.95), draws=100),
    Case("Learn-then-Test itself", "holds", calibrated, draws=2, check=safe_and_useful),
]
