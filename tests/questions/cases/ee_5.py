"""Layers whose confidence and accuracy are known, on items that differ in both."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.early_exit_readings import ExitReadings
from emad_ref.measurements.early_exits import LayerReadings
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulated_exits import leg_by_name, near
from tests.questions.simulation import Case

ITEMS = 200
SAID, RIGHT = (0.9, 0.6, 0.5), (0.1, 0.6, 0.9)  # of three layers: overconfident, calibrated, better than it says


def items(rng: np.random.Generator) -> np.ndarray:
    """[tokens] the item of each token, 2 to 11 of each."""
    return np.repeat(np.arange(ITEMS), rng.integers(2, 12, ITEMS))


def reading(rng: np.random.Generator) -> LayerReadings:
    """Every token of a layer says the same, its item a little more or less; that it is right is drawn by token."""
    item = items(rng)
    said = np.array(SAID) + rng.uniform(-0.05, 0.05, ITEMS)[item][:, None]
    right = rng.random((len(item), len(RIGHT))) < np.array(RIGHT)
    return LayerReadings(item, np.arange(ITEMS), np.ones_like(right, dtype=np.int64), said, right, {})


def calibration_errors(verdict: Verdict) -> None:
    """Of a layer that always says the same, the error of calibration is how far that is from how often it is right."""
    first = leg_by_name(verdict)["task, layer 1"].reason
    assert first.startswith(("confidence 0.89", "confidence 0.90", "confidence 0.91"))
    assert abs(float(first.rpartition("ECE ")[2]) - 0.8) <= 0.03


def check(verdict: Verdict) -> None:
    # 200 items of 6.5 tokens: a share strays by less than 4 × 0.5 / √1300 = 0.055
    near({f"task, layer {n}": said - right for n, (said, right) in enumerate(zip(SAID, RIGHT, strict=True), 1)}, 0.055)(
        verdict
    )
    calibration_errors(verdict)


CASES = [
    Case(
        "from overconfident to underconfident",
        "value",
        lambda rng: ExitReadings({"task": reading(rng)}),
        10,
        check=check,
    )
]
