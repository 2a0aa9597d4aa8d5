"""Early exits: readouts of every layer on the reference answers, under teacher forcing.

All three report. They do not apply to decoder-only models, random weights, or models too small for the paper's
settings. Intervals resample items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_emad.claims.base import ClaimContext
from pytest_emad.claims.early_exit_answers import make_early_exit_question
from pytest_emad.measurements.attachments import AttachedTable
from pytest_emad.measurements.early_exits import ALPHAS, EarlyExitMeasurements, LayerReadings
from pytest_emad.statistics.legs import build_measured_count_leg, build_measured_estimate_leg
from pytest_emad.statistics.rates import estimate_entropy_slope, mean_rate
from pytest_emad.statistics.verdicts import Leg, Verdict
from pytest_emad.sweep.diagnostics import (
    RANK_QUANTILES,
    expected_calibration_error,
    layer_reliability,
    quantiles_of_ranks_by_layer,
)

MEDIAN = RANK_QUANTILES.index(0.5)


Readings = Mapping[str, LayerReadings]  # task → every layer's readouts of the reference answers, by token


def gather_layer_readings(exits: EarlyExitMeasurements) -> Readings:
    """Layer readings of every available task."""
    return {task: exits.read_layers(task) for task in exits.task_names}


def decide_overconfidence(found: Readings, asked: ClaimContext) -> Verdict:
    """EE-5: per task and layer, mean confidence minus accuracy; its calibration error is in the reason."""
    legs: list[Leg] = []
    for task, read in found.items():
        for layer in layer_reliability(read.response, read.correct):
            over = read.sum_by_item(read.response[:, layer.layer - 1] - read.correct[:, layer.layer - 1])
            estimate = mean_rate(over, read.token_counts, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
            said = (
                f"confidence {layer.confidence:.2f}, accuracy {layer.accuracy:.2f}, ECE {layer.calibration_error:.2f}"
            )
            legs.append(build_measured_estimate_leg(f"{task}, layer {layer.layer}", estimate, said))
    return asked.combine_legs(legs)


def make_layer_calibration_table(exits: EarlyExitMeasurements) -> AttachedTable:
    """Confidence, accuracy and calibration error after every layer."""
    rows: list[dict[str, Any]] = [
        {
            "task": task,
            "layer": layer.layer,
            "confidence": layer.confidence,
            "accuracy": layer.accuracy,
            "ECE": layer.calibration_error,
        }
        for task, each in gather_layer_readings(exits).items()
        for layer in layer_reliability(each.response, each.correct)
    ]
    return AttachedTable("confidence and accuracy per layer", rows, "confidence and accuracy")


def decide_token_rank(found: Readings, asked: ClaimContext) -> Verdict:
    """EE-6: per task the slope of log2 rank over the layers, resampled by item, and median ranks by layer."""
    legs: list[Leg] = []
    for task, read in found.items():
        ranks = read.sum_by_item(np.log2(read.ranks))
        slope = estimate_entropy_slope(ranks, read.token_counts, threshold=0.0, rng=asked.rng)
        slope = replace(slope, unit="doublings of the rank per layer")
        legs.append(build_measured_estimate_leg(f"{task}: slope of log2 rank", slope))
        for layer, ranks in enumerate(quantiles_of_ranks_by_layer(read.ranks), start=1):
            legs.append(
                build_measured_count_leg(
                    f"{task}, layer {layer}: median", ranks[MEDIAN], len(read.item), asked.claim.unit
                )
            )
    return asked.combine_legs(legs)


def make_rank_table(exits: EarlyExitMeasurements) -> AttachedTable:
    """Quantiles of the final token's rank after every layer."""
    rows: list[dict[str, Any]] = [
        {"task": task, "layer": layer, **dict(zip((f"{q:.0%}" for q in RANK_QUANTILES), ranks.tolist(), strict=True))}
        for task, each in gather_layer_readings(exits).items()
        for layer, ranks in enumerate(quantiles_of_ranks_by_layer(each.ranks), start=1)
    ]
    return AttachedTable("rank of the final token per layer", rows, "final token rank")


def decide_contrastive_overconfidence(found: Readings, asked: ClaimContext) -> Verdict:
    """EE-11: per task, contrast and α, over all deciding layers: mean of confidence minus correctness of the token.

    The paper gives no decay rate; every leg names the one used here.
    """
    legs: list[Leg] = []
    for task, read in found.items():
        for (signal, alpha), (confidence, correct) in read.contrasts.items():
            over = read.sum_by_item((confidence - correct).mean(axis=1))
            ece = expected_calibration_error(confidence.ravel(), correct.ravel())
            estimate = mean_rate(over, read.token_counts, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
            rate = "" if ALPHAS[alpha] is None else f", decay rate {ALPHAS[alpha]:g}: the paper gives none"
            said = f"ECE {ece:.3f}, confidence {confidence.mean():.2f}, accuracy {correct.mean():.2f}{rate}"
            legs.append(build_measured_estimate_leg(f"{task}, {signal.replace('_', ' ')}, {alpha}", estimate, said))
    return asked.combine_legs(legs)


QUESTIONS = (
    make_early_exit_question("EE-5", gather_layer_readings, decide_overconfidence, tables=make_layer_calibration_table),
    make_early_exit_question("EE-6", gather_layer_readings, decide_token_rank, tables=make_rank_table),
    make_early_exit_question("EE-11", gather_layer_readings, decide_contrastive_overconfidence),
)
