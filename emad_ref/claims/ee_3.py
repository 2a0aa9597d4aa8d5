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

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import (
    EXIT_SETTINGS,
    SAME_EXITS,
    RuleComparison,
    RuleComparisons,
    answer_on_items,
    compare_rules,
    inapplicable_leg,
)
from emad_ref.measurements.early_exits import AS_CODED, EarlyExitMeasurements
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, decide_legs, estimate_leg, leg_test
from emad_ref.statistics.verdicts import Leg, Verdict

READINGS = 2


@dataclass(frozen=True)
class ContrastiveExitEvidence:
    """``fair``: both rules may first exit at the same layer; ``published``: JSD may exit one layer later."""

    fair: RuleComparisons
    published: RuleComparisons


def decide(found: ContrastiveExitEvidence, asked: ClaimContext) -> Verdict:
    """Two legs per reading, task and minimum layer: blocks earlier, and score lost."""
    fair = found.fair
    sooner, drop = asked.claim.thresholds["blocks_earlier"], asked.claim.thresholds["score_drop"]
    tests, beside = [], fair.left_out
    for each in fair.contests:
        if each.exits_alike:
            beside.append(inapplicable_leg(each.where, SAME_EXITS, len(each.ours)))
            continue
        blocks, lost = each.earlier(fair.layers, sooner, asked.rng), each.lost(drop, asked.rng)
        tests.append(leg_test(f"{each.where}: exit", blocks, "below", sooner, asked.claim.minimum))
        tests.append(leg_test(f"{each.where}: score", lost, "above", drop, asked.claim.minimum))
    legs = [*decide_legs(tests, asked.other_legs), *beside, *_as_published(found.published, asked)]
    return combine_verdict(asked.claim, asked.model, legs)


def _as_published(found: RuleComparisons, asked: ClaimContext) -> list[Leg]:
    said = "softmax response may exit one block earlier by construction"
    return [
        estimate_leg(f"{each.where}, as published: exit", each.earlier(found.layers, 0.0, asked.rng), said)
        for each in found.contests
    ]


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under both rules at the paper's threshold."""
    exits = evidence.exits

    def judged() -> Verdict:
        return decide(
            ContrastiveExitEvidence(
                RuleComparisons.of(exits, fair_comparisons(exits)), compare_rules(exits, "JSD", "softmax")
            ),
            asked,
        )

    return answer_on_items(evidence, asked, judged)


def fair_comparisons(exits: EarlyExitMeasurements) -> Iterator[RuleComparison]:
    """Both readings of JSD, each against softmax response that may exit from the same layer on."""
    for task, minimum in exits.counting:
        for reading, rule, first in (("paper", "JSD", minimum + 1), ("as coded", AS_CODED, minimum)):
            jsd, softmax = exits.answered(task, rule, minimum), exits.answered(task, "softmax", first)
            yield RuleComparison(f"{task}, j={minimum}, {reading}", jsd.exited, softmax.exited)


QUESTION = Question("EE-3", "model", answer, legs=lambda study, layers: 2 * READINGS * EXIT_SETTINGS)
