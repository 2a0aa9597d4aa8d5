"""EE-12: does state copying maintain the quality of exact deferred fill?
(Early-exit LLMs, Preliminaries, Transformer Architecture)

A report: the same rule and threshold under both schedules; what copies change may move later exits, so both are shown.
It does not apply to decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import RuleComparison, answer_on_items
from emad_ref.measurements.early_exits import EarlyExitMeasurements
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, count_leg, estimate_leg
from emad_ref.statistics.units import ByItem
from emad_ref.statistics.verdicts import Leg, Verdict

RULES = "softmax", "JSD"


@dataclass(frozen=True)
class CopyComparison:
    """``contest``: state copying against deferred fill; ``same`` [items] bool, the same text under both."""

    contest: RuleComparison
    same: ByItem


@dataclass(frozen=True)
class StateCopyingEvidence:
    """Of a model of ``layers`` blocks."""

    copied: tuple[CopyComparison, ...]
    layers: int


def decide(found: StateCopyingEvidence, asked: ClaimContext) -> Verdict:
    """Score gained, blocks earlier and the share of unchanged texts, per task and rule; all only reported."""
    legs: list[Leg] = []
    for each in found.copied:
        contest, where = each.contest, each.contest.where
        legs.append(estimate_leg(f"{where}: score", contest.gained(0.0, asked.rng, asked.claim.unit)))
        legs.append(estimate_leg(f"{where}: exit", contest.earlier(found.layers, 0.0, asked.rng)))
        legs.append(count_leg(f"{where}: same text", each.same.values.mean(), len(each.same), "share"))
    return combine_verdict(asked.claim, asked.model, legs)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under both schedules, at the least minimum layer."""
    exits = evidence.exits
    return answer_on_items(
        evidence, asked, lambda: decide(StateCopyingEvidence(copies(exits), exits.subject.stepper.layers), asked)
    )


def copies(exits: EarlyExitMeasurements) -> tuple[CopyComparison, ...]:
    """Softmax response and JSD on every task."""
    found, minimum = [], exits.minima[0]
    for task in exits.tasks:
        for rule in RULES:
            copied, exact = (
                exits.answered(task, rule, minimum),
                exits.answered(task, rule, minimum, schedule="free_deferred"),
            )
            same = np.array([a == b for a, b in zip(copied.texts, exact.texts, strict=True)])
            contest = RuleComparison(f"{task}, {rule}, j={minimum}", copied.exited, exact.exited)
            found.append(CopyComparison(contest, copied.exited.score.like(same)))
    return tuple(found)


QUESTION = Question("EE-12", "model", answer)
