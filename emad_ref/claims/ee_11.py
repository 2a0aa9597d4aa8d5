"""EE-11: does a constant α = 0.1 lead to overconfidence, and the decaying α′ not?
(Early-exit LLMs, Addressing the Trade-Off Via Contrastive Decoding)

A report, read under teacher forcing over all layers that can decide. The paper gives no decay rate; ours is named in
every leg. It does not apply to decoder-only models, to random weights, nor to a model without room for the settings.
"""

from __future__ import annotations

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import ExitReadings, answer_on_items, layer_readings
from emad_ref.measurements.early_exits import ALPHAS
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, estimate_leg
from emad_ref.statistics.rates import mean_rate
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.diagnostics import expected_calibration_error


def decide(found: ExitReadings, asked: ClaimContext) -> Verdict:
    """One leg per task, contrast and α: confidence minus whether what would be emitted is right, over those layers."""
    legs: list[Leg] = []
    for task, read in found.read.items():
        for (signal, alpha), (confidence, correct) in read.contrasts.items():
            over = read.by_item((confidence - correct).mean(axis=1))
            ece = expected_calibration_error(confidence.ravel(), correct.ravel())
            estimate = mean_rate(over, read.tokens, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
            rate = "" if ALPHAS[alpha] is None else f", decay rate {ALPHAS[alpha]:g}: the paper gives none"
            said = f"ECE {ece:.3f}, confidence {confidence.mean():.2f}, accuracy {correct.mean():.2f}{rate}"
            legs.append(estimate_leg(f"{task}, {signal.replace('_', ' ')}, {alpha}", estimate, said))
    return combine_verdict(asked.claim, asked.model, legs)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the readings of every task."""
    return answer_on_items(evidence, asked, lambda: decide(layer_readings(evidence.exits), asked))


QUESTION = Question("EE-11", "model", answer)
