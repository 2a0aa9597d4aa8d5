"""EE-3: does JSD contrastive confidence exit earlier than softmax response, within 2 points of its score or better?
(Early-exit LLMs, Contrastive Decoding)

JSD cannot leave at the minimum layer itself, where there is nothing to contrast with: a block given away. It does not
apply to decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import EXIT_SETTINGS, Contested, contests, on_items, unasked
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.legs import corrected, row, weighed


def decide(found: Contested, asked: Asked) -> Verdict:
    """Two legs per task and minimum layer: blocks earlier, and score lost."""
    sooner, drop = asked.claim.thresholds["blocks_earlier"], asked.claim.thresholds["score_drop"]
    tests = []
    for each in found.contests:
        blocks, lost = each.earlier(found.layers, sooner, asked.rng), each.lost(drop, asked.rng)
        tests.append(weighed(f"{each.where}: exit", blocks, "below", sooner, asked.claim.minimum))
        tests.append(weighed(f"{each.where}: score", lost, "above", drop, asked.claim.minimum))
    return row(asked.claim, asked.model, [*corrected(tests, asked.other_legs), *unasked(found.missing)])


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under both rules at the paper's threshold."""
    exits = evidence.exits
    return on_items(evidence, asked, lambda: decide(contests(exits, "JSD", "softmax"), asked))


QUESTION = Question("EE-3", "model", answer, legs=lambda study, layers: 2 * EXIT_SETTINGS)
