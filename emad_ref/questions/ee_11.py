"""EE-11: does a constant α = 0.1 lead to overconfidence, and the decaying α′ not?
(Early-exit LLMs, Addressing the Trade-Off Via Contrastive Decoding)

A report, read under teacher forcing over all layers that can decide. The paper gives no decay rate; ours is named in
every leg. It does not apply to decoder-only models, to random weights, nor to a model without room for the settings.
"""

from __future__ import annotations

from emad_ref.evidence.exits.reading import ALPHAS
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import Readings, on_items, readings
from emad_ref.sweep.exits import expected_calibration_error
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import estimated, row
from emad_ref.verdict.rates import mean_rate


def decide(found: Readings, asked: Asked) -> Verdict:
    """One leg per task, contrast and α: confidence minus whether what would be emitted is right, over those layers."""
    legs: list[Leg] = []
    for task, read in found.read.items():
        for (signal, alpha), (confidence, correct) in read.contrasts.items():
            over = read.by_item((confidence - correct).mean(axis=1))
            ece = expected_calibration_error(confidence.ravel(), correct.ravel())
            estimate = mean_rate(over, read.tokens, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
            rate = "" if ALPHAS[alpha] is None else f", decay rate {ALPHAS[alpha]:g}: the paper gives none"
            said = f"ECE {ece:.3f}, confidence {confidence.mean():.2f}, accuracy {correct.mean():.2f}{rate}"
            legs.append(estimated(f"{task}, {signal.replace('_', ' ')}, {alpha}", estimate, said))
    return row(asked.claim, asked.model, legs)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From the readings of every task."""
    return on_items(evidence, asked, lambda: decide(readings(evidence.exits), asked))


QUESTION = Question("EE-11", "model", answer)
