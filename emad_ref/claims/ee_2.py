"""EE-2: what does decaying pruning save and cost against fixed pruning? (Early-exit LLMs, Softmax Speed-Up)

A report: FLOP ratios as counted, and the score lost, paired by item. It does not apply to decoder-only models, to
random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import answer_on_items
from emad_ref.claims.early_exit_flops import PruningComparison, compare_pruning, part_legs
from emad_ref.claims.premises import with_flop_evidence
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, estimate_leg
from emad_ref.statistics.verdicts import Leg, Verdict


@dataclass(frozen=True)
class DecayingPruningEvidence:
    """``pruned``: fixed pruning before, decaying after."""

    pruned: tuple[PruningComparison, ...]


def decide(found: DecayingPruningEvidence, asked: ClaimContext) -> Verdict:
    """Three FLOP ratios and the score lost, per task and minimum layer; all only reported."""
    legs: list[Leg] = []
    for each in found.pruned:
        legs += part_legs(each, None)
        legs.append(estimate_leg(f"{each.where}: score lost", each.lost(0.0, asked.rng)))
    return combine_verdict(asked.claim, asked.model, legs)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under softmax response with fixed and with decaying pruning."""
    exits, rules = evidence.exits, ("softmax, fixed", "softmax, decaying")

    def judged() -> Verdict:
        return with_flop_evidence(
            decide(DecayingPruningEvidence(compare_pruning(exits, *rules, exits.settings)), asked),
            evidence.flop_verification,
        )

    return answer_on_items(evidence, asked, judged)


QUESTION = Question("EE-2", "model", answer)
