"""EE-15: do JSD contrastive exits improve the score over no exiting? (Early-exit LLMs, Contrastive Decoding)

It does not apply to decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import EXIT_SETTINGS, on_items, unasked
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.interval import difference
from emad_ref.verdict.legs import counted, judge_side
from emad_ref.verdict.units import ByItem


@dataclass(frozen=True)
class Scores:
    """Of one task: ``full`` at full depth, ``early`` minimum layer → under JSD; the same items in the same order."""

    full: ByItem
    early: Mapping[int, ByItem]


@dataclass(frozen=True)
class Found:
    """``scores``: by task; ``missing``: task that could not be asked → why."""

    scores: Mapping[str, Scores]
    missing: Mapping[str, str] = field(default_factory=dict)


def decide(found: Found, asked: Asked) -> Verdict:
    """One leg per task and minimum layer: score gained over full depth, whose own score stands beside it."""
    least = asked.claim.thresholds["score_gain"]
    gains, beside = {}, []
    for task, scores in found.scores.items():
        full = scores.full
        beside.append(counted(f"{task}: score at full depth", full.values.mean(), len(full), "score"))
        for minimum, early in scores.early.items():
            gain = difference(early, full, threshold=least, rng=asked.rng, unit=asked.claim.unit)
            gains[f"{task}, j={minimum}"] = gain
    beside += unasked(found.missing)
    return judge_side(asked.claim, asked.model, gains, "below", least, other_legs=asked.other_legs, beside=beside)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under JSD and at full depth."""
    exits = evidence.exits
    return on_items(evidence, asked, lambda: decide(Found(scores(exits), exits.missing), asked))


def scores(exits: Exits) -> dict[str, Scores]:
    """Of every task that can be asked."""
    return {
        task: Scores(
            exits.under(task, exits.full).exited.score,
            {minimum: exits.answered(task, "JSD", minimum).exited.score for minimum in exits.minima},
        )
        for task in exits.tasks
    }


QUESTION = Question("EE-15", "model", answer, legs=lambda study, layers: EXIT_SETTINGS)
