"""EE-13: does a fine-tuned model exit earlier than the same model pre-trained only?
(Early-exit LLMs, Introduction, and Softmax Speed-Up)

The same items, rule and threshold before and after tuning, on tasks that the tuned model solves. It applies to the
bundled pair of T5s alone: of no other model both states are at hand. Nor does it apply to decoder-only models, or to
random weights; where tuning moves no exit there is nothing to compare.
"""

from __future__ import annotations

from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import EXIT_SETTINGS, SAME_EXITS, Contest, Contested, on_items, premise_absent
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.legs import counted, judge_side


def decide(found: Contested, asked: Asked) -> Verdict:
    """One leg per task and minimum layer: blocks earlier; exits and scores of both models beside it."""
    least = asked.claim.thresholds["blocks_earlier"]
    blocks, beside = {}, found.left_out
    for each in found.contests:
        if each.exits_alike:
            beside.append(premise_absent(each.where, SAME_EXITS, len(each.ours)))
        else:
            blocks[each.where] = each.earlier(found.layers, least, asked.rng)
        for name, side in (("pre-trained", each.theirs), ("tuned", each.ours)):
            where = f"{each.where}, {name}"
            beside.append(counted(f"{where}: mean exit", side.mean_exit, len(side), "blocks"))
            beside.append(counted(f"{where}: score", side.score.values.mean(), len(side), "score"))
    return judge_side(asked.claim, asked.model, blocks, "below", least, other_legs=asked.other_legs, beside=beside)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers of both models under softmax response."""
    exits = evidence.exits

    def judged() -> Verdict:
        twin = exits.twin
        if not isinstance(twin, Exits):
            return asked.not_applicable(twin)
        before, after = (exits, twin) if exits.pretrained else (twin, exits)
        return decide(Contested.of(after, tuning(before, after)), asked)

    return on_items(evidence, asked, judged)


def tuning(before: Exits, after: Exits) -> tuple[Contest, ...]:
    """The tuned model against the pre-trained one, at every task and minimum layer."""
    return tuple(
        Contest(
            f"{task}, j={minimum}",
            after.answered(task, "softmax", minimum).exited,
            before.answered(task, "softmax", minimum).exited,
        )
        for task, minimum in after.counting
    )


QUESTION = Question("EE-13", "model", answer, legs=lambda study, layers: EXIT_SETTINGS)
