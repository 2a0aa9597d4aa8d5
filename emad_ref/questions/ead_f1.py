"""EAD-F1: does switching keep the paper's share of the large model's score at the savings it claims? (EAD, Abstract)

For each task on which the large model is 10 points better, and each of the paper's two results, the rule that scores
best on validation among those that save as much; its score on other items, against the large model's on the same. It
does not apply to weights without quality, nor where the large model is not better on any task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emad_ref.decoding.switching import LARGE, SMALL
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.pair.answered import described, table_row
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.evidence.pair.speculation import DRAFTED
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.paired import about, nothing_to_route
from emad_ref.verdict.claims import Claim, Leg, Verdict
from emad_ref.verdict.interval import retained
from emad_ref.verdict.legs import corrected, counted, row, unseen, weighed
from emad_ref.verdict.units import ByItem

RESULTS = ("llama", "qwen")  # the paper's two: names of thresholds


def savings(claim: Claim) -> tuple[float, ...]:
    """The savings at which the paper reports scores, as the row in force states them."""
    return tuple(claim.thresholds[f"saving_{result}"] for result in RESULTS)


MOST_TASKS = 5  # the world's: on how many of them a pair is worth routing, only validation knows


@dataclass(frozen=True)
class Judged:
    """Right [items] under the ``rule`` put forward and by the large model alone, and what the rule saves there."""

    rule: str
    right: ByItem
    alone: ByItem
    saving: float


@dataclass(frozen=True)
class Routed:
    """One task at one of the paper's ``RESULTS``; ``judged`` None: no rule tried on validation saves as much."""

    task: str
    result: str
    judged: Judged | None


@dataclass(frozen=True)
class Found:
    routed: tuple[Routed, ...]


def decide(found: Found, asked: Asked) -> Verdict:
    """One leg per task and result; beside it what the rule really saves on the judged items."""
    tests, beside = [], []
    for routed in found.routed:
        wanted, kept = (asked.claim.thresholds[f"{what}_{routed.result}"] for what in ("saving", "retained"))
        name, judged = f"{routed.task}, −{wanted:.1%}", routed.judged
        if judged is None:
            beside.append(unseen(name, "no rule tried on validation saves as much"))
            continue
        estimate = retained(judged.right, judged.alone, kept)
        tests.append(weighed(name, estimate, "below", kept, asked.claim.minimum))
        saved = counted(_saving(name), judged.saving, len(judged.right), "saving", judged.rule)
        beside.append(replace(saved, threshold=wanted))
    legs = _short_of_saving(corrected(tests, asked.other_legs), beside)
    return row(asked.claim, asked.model, [*legs, *beside])


def _saving(name: str) -> str:
    return f"{name}: saving"


def _short_of_saving(legs: Sequence[Leg], beside: Sequence[Leg]) -> Iterator[Leg]:
    """A score that is kept at less than the paper's saving shows nothing; one that is lost there shows all the more."""
    saved = {leg.name: leg for leg in beside}
    for leg in legs:
        at = saved[_saving(leg.name)]
        assert at.estimate is not None, "savings are counted"
        assert at.threshold is not None
        if leg.outcome == "survived" and at.estimate < at.threshold:
            yield replace(leg, outcome="inconclusive", reason=f"saves only {at.estimate:.1%} on the judged items")
        else:
            yield leg


def answer(pair: Pair, asked: Asked) -> Answer:
    """Beside it all rules tried, and score against cost of every way to decode the judged items."""
    if absent := nothing_to_route(pair, asked):
        return absent
    tasks, rules = pair.rules.tasks, pair.rules
    found = Found(tuple(_routed(pair, asked.claim, task, result) for task in tasks for result in RESULTS))
    verdict = decide(found, asked)
    exhibits = Exhibits(notes=(rules.note,))
    for task in tasks:
        tried = [table_row(described(rule), rules.validated(rule, task)) for rule in rules.tried(task)]
        against = Table(f"score against cost on {task}", _rows(pair, asked.claim, task), "score against cost")
        exhibits += Exhibits((Table(f"rules tried on {task}", tried), against))
    return about(pair, verdict, exhibits)


def _routed(pair: Pair, claim: Claim, task: str, result: str) -> Routed:
    rule = pair.rules.chosen(task, claim.thresholds[f"saving_{result}"])
    if rule is None:
        return Routed(task, result, None)
    done, alone = pair.rules.judged(rule, task), pair.rules.judged_alone(LARGE, task)
    saving = pair.models.saving(done.large_share)
    return Routed(task, result, Judged(described(rule), done.right, alone.right, saving))


def _rows(pair: Pair, claim: Claim, task: str) -> list[dict[str, Any]]:
    """Both models alone, every rule judged, speculative decoding: the same items, every number from records."""
    chosen = dict.fromkeys(pair.rules.chosen(task, claim.thresholds[f"saving_{result}"]) for result in RESULTS)
    rows = {"small alone": pair.rules.judged_alone(SMALL, task)}
    rows |= {f"EAD, {described(rule)}": pair.rules.judged(rule, task) for rule in chosen if rule is not None}
    rows |= {"large alone": pair.rules.judged_alone(LARGE, task)}
    rows |= {f"speculative, k = {DRAFTED}": pair.answers.speculated(task, "evaluate", pair.size.judged)}
    return [table_row(name, done) for name, done in rows.items()]


QUESTION = Question("EAD-F1", "pair", answer, legs=lambda study, layers: len(RESULTS) * MOST_TASKS)
