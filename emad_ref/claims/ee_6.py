"""EE-6: does the rank of the final token fall with depth?
(Early-exit LLMs, Early Exiting Via the Softmax Approach, Figure 1)

A report, read under teacher forcing: the rank that each layer gives to the token which the last layer prefers. It does
not apply to decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import ExitReadings, answer_on_items, layer_readings
from emad_ref.measurements.attachments import AttachedTable
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, count_leg, estimate_leg
from emad_ref.statistics.rates import profile_slope
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.diagnostics import RANK_QUANTILES, rank_quantiles

MEDIAN = RANK_QUANTILES.index(0.5)


def decide(found: ExitReadings, asked: ClaimContext) -> Verdict:
    """Per task the slope of log2 rank over the layers, resampled by item, and the median rank after each layer."""
    legs: list[Leg] = []
    for task, read in found.read.items():
        slope = profile_slope(read.by_item(np.log2(read.ranks)), read.tokens, threshold=0.0, rng=asked.rng)
        slope = replace(slope, unit="doublings of the rank per layer")
        legs.append(estimate_leg(f"{task}: slope of log2 rank", slope))
        for layer, ranks in enumerate(rank_quantiles(read.ranks), start=1):
            legs.append(count_leg(f"{task}, layer {layer}: median", ranks[MEDIAN], len(read.item), asked.claim.unit))
    return combine_verdict(asked.claim, asked.model, legs)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the readings of every task; the quantiles of the rank after every layer on a table."""
    exits = evidence.exits
    return answer_on_items(
        evidence, asked, lambda: decide(layer_readings(exits), asked), lambda: (layers(layer_readings(exits)),)
    )


def layers(found: ExitReadings) -> AttachedTable:
    """Quantiles of the final token's rank after every layer."""
    rows: list[dict[str, Any]] = [
        {"task": task, "layer": layer, **dict(zip((f"{q:.0%}" for q in RANK_QUANTILES), ranks.tolist(), strict=True))}
        for task, each in found.read.items()
        for layer, ranks in enumerate(rank_quantiles(each.ranks), start=1)
    ]
    return AttachedTable("rank of the final token per layer", rows, "final token rank")


QUESTION = Question("EE-6", "model", answer)
