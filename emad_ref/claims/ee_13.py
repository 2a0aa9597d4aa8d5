"""EE-13: does a fine-tuned model exit earlier than the same model pre-trained only?
(Early-exit LLMs, Introduction, and Softmax Speed-Up)

The same items, rule and threshold before and after tuning, on tasks that the tuned model solves. It applies to the
bundled pair of T5s alone: of no other model both states are at hand. Nor does it apply to decoder-only models, or to
random weights; where tuning moves no exit there is nothing to compare.
"""

from __future__ import annotations

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import (
    EXIT_SETTINGS,
    SAME_EXITS,
    RuleComparison,
    RuleComparisons,
    answer_on_items,
    inapplicable_leg,
)
from emad_ref.measurements.early_exits import EarlyExitMeasurements
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import count_leg, judge_side
from emad_ref.statistics.verdicts import Verdict


def decide(found: RuleComparisons, asked: ClaimContext) -> Verdict:
    """One leg per task and minimum layer: blocks earlier; exits and scores of both models beside it."""
    least = asked.claim.thresholds["blocks_earlier"]
    blocks, beside = {}, found.left_out
    for each in found.contests:
        if each.exits_alike:
            beside.append(inapplicable_leg(each.where, SAME_EXITS, len(each.ours)))
        else:
            blocks[each.where] = each.earlier(found.layers, least, asked.rng)
        for name, side in (("pre-trained", each.theirs), ("tuned", each.ours)):
            where = f"{each.where}, {name}"
            beside.append(count_leg(f"{where}: mean exit", side.mean_exit, len(side), "blocks"))
            beside.append(count_leg(f"{where}: score", side.score.values.mean(), len(side), "score"))
    return judge_side(asked.claim, asked.model, blocks, "below", least, other_legs=asked.other_legs, beside=beside)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers of both models under softmax response."""
    exits = evidence.exits

    def judged() -> Verdict:
        twin = exits.twin
        if not isinstance(twin, EarlyExitMeasurements):
            return asked.not_applicable(twin)
        before, after = (exits, twin) if exits.pretrained else (twin, exits)
        return decide(RuleComparisons.of(after, tuning(before, after)), asked)

    return answer_on_items(evidence, asked, judged)


def tuning(before: EarlyExitMeasurements, after: EarlyExitMeasurements) -> tuple[RuleComparison, ...]:
    """The tuned model against the pre-trained one, at every task and minimum layer."""
    return tuple(
        RuleComparison(
            f"{task}, j={minimum}",
            after.answered(task, "softmax", minimum).exited,
            before.answered(task, "softmax", minimum).exited,
        )
        for task, minimum in after.counting
    )


QUESTION = Question("EE-13", "model", answer, legs=lambda study, layers: EXIT_SETTINGS)
