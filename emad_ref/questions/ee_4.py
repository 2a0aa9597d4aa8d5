"""EE-4: what does JSD with adaptive pruning save against JSD alone, and what score does it cost?
(Early-exit LLMs, Comparison with Baseline Models)

A report, with the arithmetic of a token that never exits beside it; where items cannot be decoded, that stands alone.
It does not apply to decoder-only models, nor to one without room for the paper's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exit_flops import (
    Pruned,
    Unexited,
    instead_of_items,
    never_exiting,
    never_legs,
    paper_sized,
    part_legs,
    pruned,
)
from emad_ref.questions.early_exits import on_items, unasked
from emad_ref.questions.flop_counts import with_evidence
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import estimated, row

RULES = "JSD", "JSD, adaptive"


@dataclass(frozen=True)
class Found:
    """``never``: a token that never exits, of the model under test and of the paper's.

    ``pruned``: () where no item could be decoded. ``missing``: what could not be asked → why.
    """

    never: tuple[Unexited, ...]
    pruned: tuple[Pruned, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def decide(found: Found, asked: Asked) -> Verdict:
    """Three FLOP ratios and the score lost, per task and minimum layer, then arithmetic; all only reported."""
    legs: list[Leg] = []
    for each in found.pruned:
        legs += part_legs(each, None)
        legs.append(estimated(f"{each.where}: score lost", each.lost(0.0, asked.rng)))
    return row(asked.claim, asked.model, [*legs, *never_legs(found.never, None), *unasked(found.missing)])


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under JSD with and without adaptive pruning, and from geometry."""
    exits, own = evidence.exits, never_exiting(evidence.subject, *RULES)
    never, absence = (*own, *paper_sized(*RULES)), exits.absence
    if absence is not None and own:
        verdict = decide(Found(never, missing=instead_of_items(absence)), asked)
        return Answer(verdict, evidence.corpus, evidence.fingerprint)

    def judged() -> Verdict:
        return with_evidence(decide(Found(never, pruned(exits, *RULES, exits.settings)), asked), evidence.witnessed)

    return on_items(evidence, asked, judged)


QUESTION = Question("EE-4", "model", answer)
