"""EE-12: does state copying maintain the quality of exact deferred fill?
(Early-exit LLMs, Preliminaries, Transformer Architecture)

A report: the same rule and threshold under both schedules; what copies change may move later exits, so both are shown.
It does not apply to decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import Contest, on_items
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.units import ByItem

RULES = "softmax", "JSD"


@dataclass(frozen=True)
class Copied:
    """``contest``: state copying against deferred fill; ``same`` [items] bool, the same text under both."""

    contest: Contest
    same: ByItem


@dataclass(frozen=True)
class Found:
    """Of a model of ``layers`` blocks."""

    copied: tuple[Copied, ...]
    layers: int


def decide(found: Found, asked: Asked) -> Verdict:
    """Score gained, blocks earlier and the share of unchanged texts, per task and rule; all only reported."""
    legs: list[Leg] = []
    for each in found.copied:
        contest, where = each.contest, each.contest.where
        legs.append(estimated(f"{where}: score", contest.gained(0.0, asked.rng, asked.claim.unit)))
        legs.append(estimated(f"{where}: exit", contest.earlier(found.layers, 0.0, asked.rng)))
        legs.append(counted(f"{where}: same text", each.same.values.mean(), len(each.same), "share"))
    return row(asked.claim, asked.model, legs)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under both schedules, at the least minimum layer."""
    exits = evidence.exits
    return on_items(evidence, asked, lambda: decide(Found(copies(exits), exits.subject.stepper.layers), asked))


def copies(exits: Exits) -> tuple[Copied, ...]:
    """Softmax response and JSD on every task."""
    found, minimum = [], exits.minima[0]
    for task in exits.tasks:
        for rule in RULES:
            copied, exact = (
                exits.answered(task, rule, minimum),
                exits.answered(task, rule, minimum, schedule="free_deferred"),
            )
            same = np.array([a == b for a, b in zip(copied.texts, exact.texts, strict=True)])
            contest = Contest(f"{task}, {rule}, j={minimum}", copied.exited, exact.exited)
            found.append(Copied(contest, copied.exited.score.like(same)))
    return tuple(found)


QUESTION = Question("EE-12", "model", answer)
