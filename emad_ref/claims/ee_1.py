"""EE-1: does pruning the vocabulary to a fixed size cut confidence FLOPs a hundredfold, at 2 points of score or less?
(Early-exit LLMs, Softmax Speed-Up)

Confidence FLOPs meet the threshold, those of the decoder and of the whole model stand beside them; the score is paired
by item. Where items cannot be decoded, geometry decides alone: scores of random weights say nothing, arithmetic does.
It does not apply to decoder-only models, nor to one without room for the paper's settings. Scores are asked of tasks
that the model solves; where pruning changes none of them, nothing shows that it costs nothing, and the row does not
survive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import (
    EXIT_SETTINGS,
    SAME_SCORES,
    answer_on_items,
    missing_task_legs,
    undecided_leg,
)
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
from emad_ref.statistics.legs import combine_verdict, decide_legs, leg_test
from emad_ref.statistics.verdicts import Verdict

RULES = "softmax", "softmax, fixed"


@dataclass(frozen=True)
class FixedPruningEvidence:
    """``never``: a token that never exits, of the model under test; ``papers``: of the paper's.

    ``pruned``: () where no item could be decoded. ``missing``: task, or items, that could not be asked → why;
    ``unsolved``: task that was asked and does not count → why.
    """

    never: tuple[NeverExitingToken, ...]
    papers: tuple[NeverExitingToken, ...]
    pruned: tuple[PruningComparison, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    unsolved: Mapping[str, str] = field(default_factory=dict)


def decide(found: FixedPruningEvidence, asked: ClaimContext) -> Verdict:
    """FLOPs are counted, hence exact; one tested leg per task and minimum layer: the score lost, above which it fails.

    Falsified counts stand first.
    """
    least, drop = asked.claim.thresholds["flop_ratio"], asked.claim.thresholds["score_drop"]
    legs = [*never_legs(found.never, None if found.pruned else least), *never_legs(found.papers, None)]
    tests, beside = [], missing_task_legs(found.missing, found.unsolved)
    for each in found.pruned:
        legs += part_legs(each, least)
        score = f"{each.where}: score"
        if each.scores_alike:
            beside.append(undecided_leg(score, SAME_SCORES, len(each.before)))
        else:
            tests.append(leg_test(score, each.lost(drop, asked.rng), "above", drop, asked.claim.minimum))
    if found.pruned:
        legs.sort(key=lambda leg: leg.outcome != "falsified")
    return combine_verdict(asked.claim, asked.model, [*legs, *decide_legs(tests, asked.other_legs), *beside])


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under softmax response with and without fixed pruning, and from geometry."""
    exits, never, papers = evidence.exits, never_exiting(evidence.subject, *RULES), paper_never_exiting(*RULES)
    absence = exits.absence
    if absence is not None and never:
        verdict = decide(FixedPruningEvidence(never, papers, missing=instead_of_items(absence)), asked)
        return Answer(verdict, evidence.corpus, evidence.fingerprint)

    def judged() -> Verdict:
        counted = compare_pruning(exits, *RULES, exits.counting)
        verdict = decide(FixedPruningEvidence(never, papers, counted, exits.missing, exits.unsolved), asked)
        return with_flop_evidence(verdict, evidence.flop_verification)

    return answer_on_items(evidence, asked, judged)


QUESTION = Question("EE-1", "model", answer, legs=lambda study, layers: EXIT_SETTINGS)
