"""EE-15: do JSD contrastive exits improve the score over no exiting? (Early-exit LLMs, Contrastive Decoding)

It does not apply to decoder-only models, to random weights, to a model without room for the paper's settings, nor to a
task that the model does not solve. Where JSD saves less than a twentieth of the depth, or changes no item's score, it
says nothing of exits.
"""

from __future__ import annotations

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import (
    ACTS,
    EXIT_SETTINGS,
    SAME_SCORES,
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
    """One leg per task and minimum layer: score gained over full depth, whose own score stands beside it."""
    least = asked.claim.thresholds["score_gain"]
    gains, beside = {}, found.left_out
    for each in found.contests:
        full, saved = each.theirs.score, 1 - each.ours.mean_exit / found.layers
        beside.append(count_leg(f"{each.where}: score at full depth", full.values.mean(), len(full), "score"))
        if saved < ACTS:
            said = f"not exercised: exits save {saved:.1%} of the depth, less than {ACTS:.0%}"
            beside.append(inapplicable_leg(each.where, said, len(full)))
        elif each.scores_alike:
            beside.append(inapplicable_leg(each.where, SAME_SCORES, len(full)))
        else:
            gains[each.where] = each.gained(least, asked.rng, asked.claim.unit)
    return judge_side(asked.claim, asked.model, gains, "below", least, other_legs=asked.other_legs, beside=beside)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under JSD and at full depth."""
    exits = evidence.exits
    return answer_on_items(evidence, asked, lambda: decide(RuleComparisons.of(exits, against_full(exits)), asked))


def against_full(exits: EarlyExitMeasurements) -> tuple[RuleComparison, ...]:
    """JSD against full depth at every minimum layer of every task that the model solves."""
    return tuple(
        RuleComparison(
            f"{task}, j={minimum}",
            exits.answered(task, "JSD", minimum).exited,
            exits.under(task, exits.full).exited,
        )
        for task, minimum in exits.counting
    )


QUESTION = Question("EE-15", "model", answer, legs=lambda study, layers: EXIT_SETTINGS)
