"""Simulated readouts of layers with known confidence and known accuracy."""

from __future__ import annotations

import numpy as np

from pytest_emad.measurements.early_exits import LayerReadings
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.simulated_exits import leg_by_name, near
from tests.claims.simulation import Case

# ---------------------------------------------------------------- EE-5
#
# Layers of known confidence and accuracy, on items that differ in both.

ITEMS = 200
SAID, RIGHT = (0.9, 0.6, 0.5), (0.1, 0.6, 0.9)  # of three layers: overconfident, calibrated, underconfident


def items(rng: np.random.Generator) -> np.ndarray:
    """Return the item of each token, [tokens]; items have 2 to 11 tokens."""
    return np.repeat(np.arange(ITEMS), rng.integers(2, 12, ITEMS))


def confident_reading(rng: np.random.Generator) -> LayerReadings:
    """Every token of a layer has the same confidence, shifted a little by item; its correctness is drawn by token."""
    item = items(rng)
    said = np.array(SAID) + rng.uniform(-0.05, 0.05, ITEMS)[item][:, None]
    right = rng.random((len(item), len(RIGHT))) < np.array(RIGHT)
    return LayerReadings(item, np.arange(ITEMS), np.ones_like(right, dtype=np.int64), said, right, {})


def calibration_errors(verdict: Verdict) -> None:
    """The calibration error of a layer of constant confidence is the distance from its confidence to its accuracy."""
    first = leg_by_name(verdict)["task, layer 1"].reason
    assert first.startswith(("confidence 0.89", "confidence 0.90", "confidence 0.91"))
    assert abs(float(first.rpartition("ECE ")[2]) - 0.8) <= 0.03


def check_confidence(verdict: Verdict) -> None:
    # 200 items of 6.5 tokens: a share errs by less than 4 × 0.5 / √1300 = 0.055
    near({f"task, layer {n}": said - right for n, (said, right) in enumerate(zip(SAID, RIGHT, strict=True), 1)}, 0.055)(
        verdict
    )
    calibration_errors(verdict)


EE_5 = [
    Case(
        "from overconfident to underconfident",
        "value",
        lambda rng: {"task": confident_reading(rng)},
        10,
        check=check_confidence,
    )
]


# ---------------------------------------------------------------- EE-6
#
# Ranks that halve or double from layer to layer.

RANKED_LAYERS = 4


def ranked_reading(rng: np.random.Generator, doublings: int) -> LayerReadings:
    """Return ranks 2^(a + doublings·ℓ); a is a random bit of the item plus one of the token, so that items differ."""
    item = items(rng)
    low = rng.integers(0, 2, item.max() + 1)[item] + rng.integers(0, 2, len(item))
    layer = np.arange(RANKED_LAYERS) if doublings > 0 else np.arange(RANKED_LAYERS)[::-1]
    ranks = 2 ** (low[:, None] + layer)
    return LayerReadings(
        item, np.arange(item.max() + 1), ranks, np.zeros(ranks.shape), np.zeros(ranks.shape, dtype=bool), {}
    )


def case(name: str, doublings: int, medians: tuple[int, ...]) -> Case:
    """The middle of a = 0, 1, 1, 2 is 1: the median rank is 2 where the smallest is 1."""
    truths = {"task: slope of log2 rank": float(doublings)}
    truths |= {f"task, layer {n}: median": float(rank) for n, rank in enumerate(medians, 1)}
    return Case(
        name,
        "value",
        lambda rng: {"task": ranked_reading(rng, doublings)},
        draws=5,
        check=near(truths, 1e-9),
    )


EE_6 = [
    case("ranks halve", -1, (16, 8, 4, 2)),
    case("ranks double", 1, (2, 4, 8, 16)),
]


# ---------------------------------------------------------------- EE-11
#
# Contrasts with a known difference between confidence and accuracy.

CONTRAST_LAYERS = 5
TRUTH = {"α = 0.1": (0.9, 0.6), "α′": (0.6, 0.75)}  # confidence of a contrast, its accuracy


def contrast_reading(rng: np.random.Generator) -> LayerReadings:
    item = items(rng)

    def contrast(said: float, right: float) -> tuple[np.ndarray, np.ndarray]:
        shape = len(item), CONTRAST_LAYERS
        confidence = said + rng.uniform(-0.05, 0.05, ITEMS)[item][:, None] + np.zeros(shape)
        return confidence, rng.random(shape) < right

    contrasts = {("weighted_contrast", alpha): contrast(*each) for alpha, each in TRUTH.items()}
    empty = np.zeros((len(item), CONTRAST_LAYERS))
    return LayerReadings(
        item, np.arange(ITEMS), np.ones(empty.shape, dtype=np.int64), empty, empty.astype(bool), contrasts
    )


def check_contrast(verdict: Verdict) -> None:
    # 200 items of 6.5 tokens and 5 layers: a share errs by less than 4 × 0.5 / √6500 = 0.025, its items' by 0.01
    near({f"task, weighted contrast, {alpha}": said - right for alpha, (said, right) in TRUTH.items()}, 0.035)(verdict)
    constant, decaying = (leg_by_name(verdict)[f"task, weighted contrast, {alpha}"].reason for alpha in TRUTH)
    assert "decay rate" not in constant
    assert decaying.endswith("decay rate 1: the paper gives none")


EE_11 = [
    Case(
        "over- and underconfident",
        "value",
        lambda rng: {"task": contrast_reading(rng)},
        draws=10,
        check=check_contrast,
    )
]


CASES = {
    "EE-5": EE_5,
    "EE-6": EE_6,
    "EE-11": EE_11,
}
