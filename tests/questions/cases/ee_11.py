"""Contrasts that say a known amount more, or less, than they are right."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.early_exit_readings import ExitReadings
from emad_ref.measurements.early_exits import LayerReadings
from emad_ref.statistics.verdicts import Verdict
from tests.questions.cases.ee_5 import ITEMS, items
from tests.questions.simulated_exits import leg_by_name, near
from tests.questions.simulation import Case

LAYERS = 5
TRUTH = {"α = 0.1": (0.9, 0.6), "α′": (0.6, 0.75)}  # what a contrast says, how often it is right


def reading(rng: np.random.Generator) -> LayerReadings:
    item = items(rng)

    def contrast(said: float, right: float) -> tuple[np.ndarray, np.ndarray]:
        shape = len(item), LAYERS
        confidence = said + rng.uniform(-0.05, 0.05, ITEMS)[item][:, None] + np.zeros(shape)
        return confidence, rng.random(shape) < right

    contrasts = {("weighted_contrast", alpha): contrast(*each) for alpha, each in TRUTH.items()}
    empty = np.zeros((len(item), LAYERS))
    return LayerReadings(
        item, np.arange(ITEMS), np.ones(empty.shape, dtype=np.int64), empty, empty.astype(bool), contrasts
    )


def check(verdict: Verdict) -> None:
    # 200 items of 6.5 tokens and 5 layers: a share strays by less than 4 × 0.5 / √6500 = 0.025, its items' by 0.01
    near({f"task, weighted contrast, {alpha}": said - right for alpha, (said, right) in TRUTH.items()}, 0.035)(verdict)
    constant, decaying = (leg_by_name(verdict)[f"task, weighted contrast, {alpha}"].reason for alpha in TRUTH)
    assert "decay rate" not in constant
    assert decaying.endswith("decay rate 1: the paper gives none")


CASES = [
    Case("over- and underconfident", "value", lambda rng: ExitReadings({"task": reading(rng)}), draws=10, check=check)
]
