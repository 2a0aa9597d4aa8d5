"""EE-5: are early layers overconfident? (Early-exit LLMs, Early Exiting Via the Softmax Approach, Figures 2 and 3)

A report, read under teacher forcing on the reference answers; intervals resample items. It does not apply to
decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from typing import Any

from emad_ref.evidence.exhibits import Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import Readings, on_items, readings
from emad_ref.sweep.exits import reliability
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import estimated, row
from emad_ref.verdict.rates import mean_rate


def decide(found: Readings, asked: Asked) -> Verdict:
    """One leg per task and layer: mean confidence minus accuracy, its calibration error in the reason."""
    legs: list[Leg] = []
    for task, read in found.read.items():
        for layer in reliability(read.response, read.correct):
            over = read.by_item(read.response[:, layer.layer - 1] - read.correct[:, layer.layer - 1])
            estimate = mean_rate(over, read.tokens, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
            said = (
                f"confidence {layer.confidence:.2f}, accuracy {layer.accuracy:.2f}, ECE {layer.calibration_error:.2f}"
            )
            legs.append(estimated(f"{task}, layer {layer.layer}", estimate, said))
    return row(asked.claim, asked.model, legs)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From the readings of every task; all layers on a table."""
    exits = evidence.exits
    return on_items(evidence, asked, lambda: decide(readings(exits), asked), lambda: (layers(readings(exits)),))


def layers(found: Readings) -> Table:
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
    return Table("confidence and accuracy per layer", rows, "confidence and accuracy")


QUESTION = Question("EE-5", "model", answer)
