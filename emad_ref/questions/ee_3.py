"""EE-3: does JSD contrastive confidence exit earlier than softmax response, within 2 points of its score or better?
(Early-exit LLMs, Contrastive Decoding)

JSD has two readings, and each is judged. In the paper's there is nothing to contrast with at the minimum layer j, so
that JSD decides from j + 1 on: softmax response then waits until j + 1 too, for a block given away would decide the row
whatever the confidence is worth. In the authors' code amateurs run from layer 2 on, JSD decides at j itself, and the
expert's own token is emitted. The paper's own comparison, one block apart, stands beside both.

It does not apply to decoder-only models, to random weights, to a model without room for the paper's settings, nor to a
task that the model does not solve; where both rules exit alike there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.exits.rules import AS_CODED
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import (
    EXIT_SETTINGS,
    SAME_EXITS,
    Contest,
    Contested,
    contests,
    on_items,
    premise_absent,
)
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import corrected, estimated, row, weighed

READINGS = 2


@dataclass(frozen=True)
class Found:
    """``fair``: both rules may first exit at the same layer; ``published``: JSD may exit one layer later."""

    fair: Contested
    published: Contested


def decide(found: Found, asked: Asked) -> Verdict:
    """Two legs per reading, task and minimum layer: blocks earlier, and score lost."""
    fair = found.fair
    sooner, drop = asked.claim.thresholds["blocks_earlier"], asked.claim.thresholds["score_drop"]
    tests, beside = [], fair.left_out
    for each in fair.contests:
        if each.exits_alike:
            beside.append(premise_absent(each.where, SAME_EXITS, len(each.ours)))
            continue
        blocks, lost = each.earlier(fair.layers, sooner, asked.rng), each.lost(drop, asked.rng)
        tests.append(weighed(f"{each.where}: exit", blocks, "below", sooner, asked.claim.minimum))
        tests.append(weighed(f"{each.where}: score", lost, "above", drop, asked.claim.minimum))
    legs = [*corrected(tests, asked.other_legs), *beside, *_as_published(found.published, asked)]
    return row(asked.claim, asked.model, legs)


def _as_published(found: Contested, asked: Asked) -> list[Leg]:
    said = "softmax response may exit one block earlier by construction"
    return [
        estimated(f"{each.where}, as published: exit", each.earlier(found.layers, 0.0, asked.rng), said)
        for each in found.contests
    ]


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under both rules at the paper's threshold."""
    exits = evidence.exits

    def judged() -> Verdict:
        return decide(Found(Contested.of(exits, fair(exits)), contests(exits, "JSD", "softmax")), asked)

    return on_items(evidence, asked, judged)


def fair(exits: Exits) -> Iterator[Contest]:
    """Both readings of JSD, each against softmax response that may exit from the same layer on."""
    for task, minimum in exits.counting:
        for reading, rule, first in (("paper", "JSD", minimum + 1), ("as coded", AS_CODED, minimum)):
            jsd, softmax = exits.answered(task, rule, minimum), exits.answered(task, "softmax", first)
            yield Contest(f"{task}, j={minimum}, {reading}", jsd.exited, softmax.exited)


QUESTION = Question("EE-3", "model", answer, legs=lambda study, layers: 2 * READINGS * EXIT_SETTINGS)
