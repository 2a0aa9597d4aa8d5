"""EE-10: does weighted contrastive confidence exit about as early as softmax response?
(Early-exit LLMs, Contrastive Decoding, Figures 6 and 7)

A report: the paper does not say how near "about" is. It does not apply to decoder-only models, to random weights, to
a model without room for the paper's settings, nor to a task that the model does not solve.
"""

from __future__ import annotations

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import RuleComparisons, answer_on_items, compare_rules
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, estimate_leg
from emad_ref.statistics.verdicts import Leg, Verdict


def decide(found: RuleComparisons, asked: ClaimContext) -> Verdict:
    """Blocks earlier and score gained, per task and minimum layer; all only reported."""
    legs: list[Leg] = []
    for each in found.contests:
        legs.append(estimate_leg(f"{each.where}: exit", each.earlier(found.layers, 0.0, asked.rng)))
        legs.append(estimate_leg(f"{each.where}: score", each.gained(0.0, asked.rng)))
    return combine_verdict(asked.claim, asked.model, [*legs, *found.left_out])


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under both rules at the paper's threshold."""
    exits, rules = evidence.exits, ("weighted contrast", "softmax")
    return answer_on_items(evidence, asked, lambda: decide(compare_rules(exits, *rules), asked))


QUESTION = Question("EE-10", "model", answer)
