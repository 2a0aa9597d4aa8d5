"""EE-10: does weighted contrastive confidence exit about as early as softmax response?
(Early-exit LLMs, Contrastive Decoding, Figures 6 and 7)

A report: the paper does not say how near "about" is. It does not apply to decoder-only models, to random weights, to
a model without room for the paper's settings, nor to a task that the model does not solve.
"""

from __future__ import annotations

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import Contested, contests, on_items
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import estimated, row


def decide(found: Contested, asked: Asked) -> Verdict:
    """Blocks earlier and score gained, per task and minimum layer; all only reported."""
    legs: list[Leg] = []
    for each in found.contests:
        legs.append(estimated(f"{each.where}: exit", each.earlier(found.layers, 0.0, asked.rng)))
        legs.append(estimated(f"{each.where}: score", each.gained(0.0, asked.rng)))
    return row(asked.claim, asked.model, [*legs, *found.left_out])


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under both rules at the paper's threshold."""
    exits, rules = evidence.exits, ("weighted contrast", "softmax")
    return on_items(evidence, asked, lambda: decide(contests(exits, *rules), asked))


QUESTION = Question("EE-10", "model", answer)
