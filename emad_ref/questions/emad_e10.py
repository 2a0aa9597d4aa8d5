"""EMAD-E10: does a margin selected on a validation set hold the drop on a test set? (EMAD, Margin selection)

Perplexity within the stricter of two bounds, points and relative, and accuracy over all replayed tasks together. It
does not apply where no margin that saves what the paper calls an operating point holds the bounds on validation, to
weights without quality, nor behind a decoder for which replay does not speak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.evidence.gathered import Evidence
from emad_ref.point import OperatingPoint
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import quality_premise
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.interval import accuracy_drop, perplexity_rise
from emad_ref.verdict.legs import corrected, row, weighed
from emad_ref.verdict.units import ByDocument, ByItem

USEFUL = 0.15  # net FLOP reduction below which the paper does not speak of an operating point


@dataclass(frozen=True)
class Selected:
    """The cheapest margin within bounds on validation, and the share of FLOPs it saves there, net."""

    name: str
    net_reduction: float


@dataclass(frozen=True)
class Answers:
    """Items of ``tasks``, one after another: which are right at full depth, and which at the selected margin."""

    tasks: Sequence[str]
    full: ByItem
    adaptive: ByItem


@dataclass(frozen=True)
class Tested:
    """On the test split: NLL sums at the selected margin and at full depth, nats, and tokens, by document.

    ``perplexity``: of full depth. ``answers``: None without replayed tasks.
    """

    nll_nats: ByDocument
    full_nll_nats: ByDocument
    tokens: ByDocument
    perplexity: float
    answers: Answers | None = None


@dataclass(frozen=True)
class Found:
    """``selected``: None where no margin holds the bounds. ``tested``: None where nothing useful is selected."""

    selected: Selected | None
    tested: Tested | None = None


def useful(selected: Selected | None) -> bool:
    """Whether there is an operating point to speak of."""
    return selected is not None and selected.net_reduction >= USEFUL


def decide(found: Found, asked: Asked) -> Verdict:
    """One leg for perplexity, one for accuracy where there are tasks."""
    selected, tested = found.selected, found.tested
    if selected is None or not useful(selected):
        saved = "none at all" if selected is None else f"{selected.name} ({selected.net_reduction:+.1%} net)"
        return asked.not_applicable(
            f"no margin that saves {USEFUL:.0%} holds the bounds on validation; selected: {saved}"
        )
    assert tested is not None, "a useful margin is tested"
    claim = asked.claim
    bound = min(claim.thresholds["perplexity_points"] / tested.perplexity, claim.thresholds["perplexity_rise"])
    sums = tested.nll_nats, tested.full_nll_nats, tested.tokens
    rise = perplexity_rise(*sums, threshold=bound, rng=asked.rng)
    legs = [weighed(f"{selected.name}: perplexity", rise, "above", bound, claim.minimum)]
    if tested.answers is not None:
        least = claim.thresholds["accuracy_drop"]
        drop = accuracy_drop(tested.answers.full, tested.answers.adaptive, threshold=least)
        name = f"{selected.name}: accuracy over {', '.join(tested.answers.tasks)}"
        legs.append(weighed(name, drop, "above", least, claim.minimum))
    return row(claim, asked.model, corrected(legs, asked.other_legs))


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """The margin that the run selects, replayed on the evaluation split."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        chosen = evidence.points.selected
        selected = None if chosen is None else Selected(chosen.point.name, chosen.net_reduction)
        tested = tested_at(evidence, chosen.point) if chosen is not None and useful(selected) else None
        verdict = decide(Found(selected, tested), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def tested_at(evidence: Evidence, point: OperatingPoint) -> Tested:
    """What ``point`` loses on the evaluation split."""
    full, traces = evidence.points.full_loss, evidence.traces
    adaptive = evidence.rivals.evaluated(point)
    nll, reference = (traces.by_document(loss.nll_nats) for loss in (adaptive, full))
    return Tested(nll, reference, traces.lengths, full.perplexity, answers_at(evidence, point))


def answers_at(evidence: Evidence, point: OperatingPoint) -> Answers | None:
    """All replayed tasks' items in one column, at full depth and at ``point``; None without tasks."""
    scored = evidence.scored
    tasks = scored.replayed
    if not tasks:
        return None
    pooled = (
        ByItem.distinct(np.concatenate([scored.correct(task, at).values for task in tasks]))
        for at in (evidence.subject.full, point)
    )
    return Answers(tasks, *pooled)


QUESTION = Question("EMAD-E10", "model", answer, legs=lambda study, layers: 2)
