"""EE-5: are early layers overconfident? (Early-exit LLMs, Early Exiting Via the Softmax Approach, Figures 2 and 3)

A report, read under teacher forcing on the reference answers; intervals resample items. It does not apply to
decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from typing import Any

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import ExitReadings, answer_on_items, layer_readings
from emad_ref.measurements.attachments import AttachedTable
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, estimate_leg
from emad_ref.statistics.rates import mean_rate
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.diagnostics import reliability


def decide(found: ExitReadings, asked: ClaimContext) -> Verdict:
    """One leg per task and layer: mean confidence minus accuracy, its calibration error in the reason."""
    legs: list[Leg] = []
    for task, read in found.read.items():
        for layer in reliability(read.response, read.correct):
            over = read.by_item(read.response[:, layer.layer - 1] - read.correct[:, layer.layer - 1])
            estimate = mean_rate(over, read.tokens, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
            said = (
                f"confidence {layer.confidence:.2f}, accuracy {layer.accuracy:.2f}, ECE {layer.calibration_error:.2f}"
            )
            legs.append(estimate_leg(f"{task}, layer {layer.layer}", estimate, said))
    return combine_verdict(asked.claim, asked.model, legs)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the readings of every task; all layers on a table."""
    exits = evidence.exits
    return answer_on_items(
        evidence, asked, lambda: decide(layer_readings(exits), asked), lambda: (layers(layer_readings(exits)),)
    )


def layers(found: ExitReadings) -> AttachedTable:
    """Confidence, accuracy and calibration error after every layer."""
    rows: list[dict[str, Any]] = [
        {
            "task": task,
            "layer": layer.layer,
            "confidence": layer.confidence,
            "accuracy": layer.accuracy,
            "ECE": layer.calibration_error,
        }
        for task, each in found.read.items()
        for layer in reliability(each.response, each.correct)
    ]
    return AttachedTable("confidence and accuracy per layer", rows, "confidence and accuracy")


QUESTION = Question("EE-5", "model", answer)
