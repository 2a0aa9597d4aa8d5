"""EE-2: what does decaying pruning save and cost against fixed pruning? (Early-exit LLMs, Softmax Speed-Up)

A report: FLOP ratios as counted, and the score lost, paired by item. It does not apply to decoder-only models, to
random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exit_flops import Pruned, part_legs, pruned
from emad_ref.questions.early_exits import on_items
from emad_ref.questions.flop_counts import with_evidence
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import estimated, row


@dataclass(frozen=True)
class Found:
    """``pruned``: fixed pruning before, decaying after."""

    pruned: tuple[Pruned, ...]


def decide(found: Found, asked: Asked) -> Verdict:
    """Three FLOP ratios and the score lost, per task and minimum layer; all only reported."""
    legs: list[Leg] = []
    for each in found.pruned:
        legs += part_legs(each, None)
        legs.append(estimated(f"{each.where}: score lost", each.lost(0.0, asked.rng)))
    return row(asked.claim, asked.model, legs)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under softmax response with fixed and with decaying pruning."""
    exits, rules = evidence.exits, ("softmax, fixed", "softmax, decaying")

    def judged() -> Verdict:
        return with_evidence(decide(Found(pruned(exits, *rules, exits.settings)), asked), evidence.witnessed)

    return on_items(evidence, asked, judged)


QUESTION = Question("EE-2", "model", answer)
