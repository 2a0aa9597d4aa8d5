"""EE-7: do thresholds chosen by Learn-then-Test keep their promise over calibration sets?
(Early-exit LLMs, Introduction, Eq. (1))

Calibration sets are drawn with replacement from the evaluated items, whose mean loss is then the true risk. The promise
is a theorem for losses in 0–1 (``sweep.risk``): a falsified row tells of the machine that keeps it. It does not apply
to decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.exits.tasks import scored
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import EXIT_TASKS, on_items, unasked
from emad_ref.record import Floats
from emad_ref.sweep.risk import Coverage, coverage, textual_consistency
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.interval import share_estimate
from emad_ref.verdict.legs import counted, judge_side
from emad_ref.verdict.units import ByItem

THRESHOLDS = (0.99, 0.9, 0.7, 0.4)  # of softmax response, strict to loose
DRAWS = 500


@dataclass(frozen=True)
class Promise:
    """``losses`` [items, λ] difference from the full text in 0–1; ``mean_exit`` [λ] blocks per token.

    ``kept``: how often thresholds chosen on sets drawn from these items kept to the tolerated difference.
    """

    losses: ByItem
    mean_exit: Floats
    kept: Coverage


@dataclass(frozen=True)
class Found:
    """``promises``: by task; ``missing``: task that could not be asked → why."""

    promises: Mapping[str, Promise]
    missing: Mapping[str, str] = field(default_factory=dict)


def decide(found: Found, asked: Asked) -> Verdict:
    """One leg per task: the share of calibration sets whose choice kept the promise, against 1 − ε."""
    delta, least = asked.claim.thresholds["tolerance"], asked.claim.thresholds["coverage"]
    shares, beside = {}, unasked(found.missing)
    for task, promise in found.promises.items():
        held, items = round(promise.kept.held * promise.kept.draws), len(promise.losses)
        shares[f"{task}, δ={delta:g}"] = share_estimate(held, promise.kept.draws, items, least, asked.claim.unit)
        beside += _beside(task, promise, asked.claim.unit)
    return judge_side(asked.claim, asked.model, shares, "below", least, other_legs=asked.other_legs, beside=beside)


def _beside(task: str, promise: Promise, unit: str) -> list[Leg]:
    """What the promise is worth: whether any exit is chosen, what it saves, and how each threshold differs."""
    kept, losses = promise.kept, promise.losses
    legs = [
        counted(f"{task}: sets that chose any exit", kept.below_full, kept.draws, unit),
        counted(f"{task}: blocks saved per token", kept.blocks_saved, kept.draws, "blocks"),
    ]
    for threshold, loss, depth in zip(THRESHOLDS, losses.values.mean(axis=0), promise.mean_exit, strict=True):
        name, said = f"{task}, λ={threshold:g}: difference from full depth", f"mean exit {depth:.2f}"
        legs.append(counted(name, loss, len(losses), "D", said))
    return legs


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under softmax response at each threshold, compared with the text of full depth."""
    exits = evidence.exits

    def judged() -> Verdict:
        promises = {
            task: promised(*consistency(exits, task), exits.subject.stepper.layers, asked) for task in exits.tasks
        }
        return decide(Found(promises, exits.missing), asked)

    return on_items(evidence, asked, judged)


def promised(losses: ByItem, mean_exit: Floats, layers: int, asked: Asked) -> Promise:
    """Choose thresholds on sets as large as the items, drawn from them with replacement."""
    pool = losses.values
    kept = coverage(
        lambda rng: pool[rng.integers(len(pool), size=len(pool))],
        pool.mean(axis=0),
        mean_exit,
        layers,
        draws=DRAWS,
        rng=asked.rng,
        tolerance=asked.claim.thresholds["tolerance"],
        level=1 - asked.claim.thresholds["coverage"],
    )
    return Promise(losses, mean_exit, kept)


def consistency(exits: Exits, task: str) -> tuple[ByItem, Floats]:
    """([items, λ] one minus the score of the early text against the full one, [λ] blocks per token)."""
    full = exits.under(task, exits.full)
    early = [exits.answered(task, "softmax", exits.minima[0], threshold) for threshold in THRESHOLDS]
    dissimilar = [
        [1 - scored(task, text, [own]) if text != own else 0.0 for text, own in zip(one.texts, full.texts, strict=True)]
        for one in early
    ]
    return ByItem.distinct(textual_consistency(np.array(dissimilar).T)), np.array(
        [one.exited.mean_exit for one in early]
    )


QUESTION = Question("EE-7", "model", answer, legs=lambda study, layers: EXIT_TASKS)
