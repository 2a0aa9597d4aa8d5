"""EE-4: what does JSD with adaptive pruning save against JSD alone, and what score does it cost?
(Early-exit LLMs, Comparison with Baseline Models)

A report, with the arithmetic of a token that never exits beside it; where items cannot be decoded, that stands alone.
It does not apply to decoder-only models, nor to one without room for the paper's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import answer_on_items, missing_task_legs
from emad_ref.claims.early_exit_flops import (
    NeverExitingToken,
    PruningComparison,
    compare_pruning,
    instead_of_items,
    never_exiting,
    never_legs,
    paper_never_exiting,
    part_legs,
)
from emad_ref.claims.premises import with_flop_evidence
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, estimate_leg
from emad_ref.statistics.verdicts import Leg, Verdict

RULES = "JSD", "JSD, adaptive"


@dataclass(frozen=True)
class AdaptivePruningEvidence:
    """``never``: a token that never exits, of the model under test and of the paper's.

    ``pruned``: () where no item could be decoded. ``missing``: what could not be asked → why.
    """

    never: tuple[NeverExitingToken, ...]
    pruned: tuple[PruningComparison, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def decide(found: AdaptivePruningEvidence, asked: ClaimContext) -> Verdict:
    """Three FLOP ratios and the score lost, per task and minimum layer, then arithmetic; all only reported."""
    legs: list[Leg] = []
    for each in found.pruned:
        legs += part_legs(each, None)
        legs.append(estimate_leg(f"{each.where}: score lost", each.lost(0.0, asked.rng)))
    return combine_verdict(
        asked.claim, asked.model, [*legs, *never_legs(found.never, None), *missing_task_legs(found.missing)]
    )


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under JSD with and without adaptive pruning, and from geometry."""
    exits, own = evidence.exits, never_exiting(evidence.subject, *RULES)
    never, absence = (*own, *paper_never_exiting(*RULES)), exits.absence
    if absence is not None and own:
        verdict = decide(AdaptivePruningEvidence(never, missing=instead_of_items(absence)), asked)
        return Answer(verdict, evidence.corpus, evidence.fingerprint)

    def judged() -> Verdict:
        return with_flop_evidence(
            decide(AdaptivePruningEvidence(never, compare_pruning(exits, *RULES, exits.settings)), asked),
            evidence.flop_verification,
        )

    return answer_on_items(evidence, asked, judged)


QUESTION = Question("EE-4", "model", answer)
