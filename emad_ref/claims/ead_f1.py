"""EAD-F1: does switching keep the paper's share of the large model's score at the savings it claims? (EAD, Abstract)

For each task on which the large model is shown to beat a guess and to be 10 points better, and each of the paper's two
results: the rules that validation puts forward for that saving take turns by items so that they save exactly as much
(``measurements.pair_routing``); their score on other items, against the large model's on the same. Both scores are
samples. It does not apply to weights without quality, nor where the large model is not better on any task; it is
unmeasured where no task is at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.pair_answers import pair_answer, routing_answer_absent
from emad_ref.decoding.switching import LARGE, SMALL
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.measurements.pair_answers import answer_row
from emad_ref.measurements.pair_models import DRAFT_TOKENS
from emad_ref.measurements.pair_routing import PAPER, turn_table
from emad_ref.measurements.study import Study
from emad_ref.statistics.accuracy import retained_share
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import combine_verdict, count_leg, decide_legs, finite_interval, leg_test, unmeasured_leg
from emad_ref.statistics.units import ByItem
from emad_ref.statistics.verdicts import Claim, Leg, Verdict
from emad_ref.text import world

RESULTS = ("llama", "qwen")  # the paper's two: names of thresholds
NEAR = 0.05  # saving: further away than this, no rule is said to save what the paper's does


def savings(claim: Claim) -> tuple[float, ...]:
    """The savings at which the paper reports scores, as the row in force states them."""
    return tuple(claim.thresholds[f"saving_{result}"] for result in RESULTS)


@dataclass(frozen=True)
class RoutedScores:
    """[items] expected ``score`` of the ``rules`` that take turns, at exactly the paper's saving; right where each item
    was ``dealt`` to one of them, and by the large model ``alone``.

    ``attained``: what validation's own proportion saves on these items; ``neighbours``: what either rule saves there.
    """

    rules: str
    score: ByItem
    dealt: ByItem
    alone: ByItem
    attained: float
    neighbours: tuple[float, float]


@dataclass(frozen=True)
class TaskAtSaving:
    """One task at one of the paper's ``RESULTS``; ``judged`` None: not even the small model alone saves as much."""

    task: str
    result: str
    judged: RoutedScores | None


@dataclass(frozen=True)
class SwitchingScoreEvidence:
    """``unrouted``: task that does not count → by how much the large model is better, and why it does not count."""

    routed: tuple[TaskAtSaving, ...]
    unrouted: tuple[tuple[str, Estimate, str], ...] = ()


def decide(found: SwitchingScoreEvidence, asked: ClaimContext) -> Verdict:
    """One leg per task and result; beside it what is saved, and the tasks that cannot tell the models apart."""
    tests, beside = [], []
    for routed in found.routed:
        wanted, kept = (asked.claim.thresholds[f"{what}_{routed.result}"] for what in ("saving", "retained"))
        name, judged = f"{routed.task}, −{wanted:.1%}", routed.judged
        if judged is None:
            beside.append(unmeasured_leg(name, "not even the small model alone saves as much by parameters"))
            continue
        if not judged.alone.values.any():
            beside.append(
                unmeasured_leg(name, "the large model answers no judged item right: there is no score to keep")
            )
            continue
        estimate = _kept(judged, kept)
        tests.append(leg_test(name, estimate, "below", kept, asked.claim.minimum))
        saved = count_leg(f"{name}: saving", judged.attained, len(judged.score), "saving", _turns(judged, wanted))
        beside.append(replace(saved, threshold=wanted))
    beside += [_unrouted(*each) for each in found.unrouted]
    return combine_verdict(asked.claim, asked.model, [*decide_legs(tests, asked.other_legs), *beside])


def _kept(judged: RoutedScores, kept: float) -> Estimate:
    """The share of the large model's score at exactly the saving: a t test on what is expected of each item, whose
    spread holds that of the proportion too (``sweep.front``).

    Where all that differs are a few items lost, t is too sure that little is: with 5 of 200 it let a rule at the
    threshold survive 9 % of the time, with 20 of 800 7 % (2,500 simulations). So to survive, the items as they were
    dealt must say so too, for which there are exact tests: the larger p-value and the lower bound count. To falsify it
    never erred more than it says.
    """
    dealt = retained_share(judged.dealt, judged.alone, kept)
    score, alone = judged.score.independent, judged.alone.independent.astype(np.float64)
    away, ratio = score - kept * alone, float(score.sum() / alone.sum())
    if len(away) < 2 or not np.ptp(away):
        return replace(dealt, value=ratio)
    above, below = (stats.ttest_1samp(away, 0.0, alternative=side).pvalue for side in ("greater", "less"))
    bounds = stats.ttest_1samp(score - ratio * alone, 0.0).confidence_interval()
    low, high = (ratio + float(bound) / alone.mean() for bound in bounds)
    return replace(
        dealt,
        value=ratio,
        low=min(dealt.low, low),
        high=high,
        p_above=max(dealt.p_above, float(above)),
        p_below=float(below),
        method=f"paired t on the expected score; to survive also {dealt.method}, items dealt out",
    )


def _turns(judged: RoutedScores, wanted: float) -> str:
    """Which rules take turns, and whether they are near enough to be called the paper's."""
    low, high = sorted(judged.neighbours)
    said = f"{judged.rules}; score read at exactly −{wanted:.1%}"
    if min(abs(saved - wanted) for saved in judged.neighbours) > NEAR:
        said += f"; no rule comes within {100 * NEAR:.0f} points: one saves {low:.1%}, the other {high:.1%}"
    return said


def _unrouted(task: str, gap: Estimate, why: str) -> Leg:
    name = f"{task}: the large model is better by"
    return Leg(name, "not applicable", gap.value, finite_interval(gap), gap.n, None, "accuracy", why)


def answer(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Beside it all rules tried, and score against cost of every way to decode the judged items."""
    if absent := routing_answer_absent(pair, asked):
        return absent
    tasks, rules = pair.rules.tasks, pair.rules
    routed = tuple(_routed(pair, asked.claim, task, result) for task in tasks for result in RESULTS)
    unrouted = tuple((task, both.gap, both.standing) for task, both in rules.compared.items() if task not in tasks)
    verdict = decide(SwitchingScoreEvidence(routed, unrouted), asked)
    exhibits = Attachments(notes=(rules.note, *(note for task in tasks if (note := _shortened(pair, task)))))
    for task in tasks:
        tried = [answer_row(rules.called(rule), done) for rule, done in rules.tried(task).items()]
        exhibits += Attachments((AttachedTable(f"rules tried on {task}", tried),))
        if task in rules.written:
            rows = _rows(pair, task)
            exhibits += Attachments((AttachedTable(f"score against cost on {task}", rows, "score against cost"),))
    if written := [task for task in tasks if task in rules.written]:
        exhibits += turn_table(rules, written[0])
    return pair_answer(pair, verdict, exhibits)


def _shortened(pair: PairMeasurements, task: str) -> str:
    """One sentence where answers are too short for the paper's w and d_min."""
    own, median = pair.rules.constants(task), pair.rules.median_answer(task)
    if own == PAPER:
        return ""
    return (
        f"{pair.name}: {task}: answers of {median:.0f} tokens (median) are too short for the paper's "
        f"w = {PAPER.window}, d_min = {PAPER.least_run}: w = {own.window}, d_min = {own.least_run}"
    )


def _routed(pair: PairMeasurements, claim: Claim, task: str, result: str) -> TaskAtSaving:
    found = pair.rules.routed(task, claim.thresholds[f"saving_{result}"])
    if found is None:
        return TaskAtSaving(task, result, None)
    alone = pair.rules.judged_alone(LARGE, task).right
    return TaskAtSaving(
        task, result, RoutedScores(found.name, found.score, found.dealt, alone, found.attained, found.neighbours)
    )


def _rows(pair: PairMeasurements, task: str) -> list[dict[str, Any]]:
    """Both models alone, every rule on the front, speculative decoding: the same items."""
    rules = pair.rules
    rows = {rules.called(rule): rules.judged(rule, task) for rule in reversed(rules.front(task))}
    rows |= {rules.called(pair.answers.never(model)): rules.judged_alone(model, task) for model in (SMALL, LARGE)}
    rows |= {f"speculative, k = {DRAFT_TOKENS}": pair.answers.speculated(task, "evaluate", pair.size.judged)}
    return [answer_row(name, done) for name, done in rows.items()]


def _most_tasks(study: Study) -> int:
    """On how many tasks a pair is worth routing only validation knows: at most on all."""
    return len(world.TASKS) + len(study.tasks)


QUESTIONS = (
    Question(
        "EAD-F1",
        "pair",
        answer,
        legs=lambda study, layers: len(RESULTS) * _most_tasks(study),
        budget="standard",
        decide=decide,
    ),
)
