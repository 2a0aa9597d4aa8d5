"""EE-7: do thresholds chosen by Learn-then-Test keep their promise over calibration sets?
(Early-exit LLMs, Introduction, Eq. (1))

The promise is about calibration sets, so sets are the unit: no two share an item, for sets drawn again and again from
the same items agree because of those items. Each set chooses by ``sweep.risk.certify``; what became of the promise is
looked up in a pool which no set has an item of (``promises``).

The promise is a theorem for independent losses in 0–1: a falsified row tells of the machine that keeps it. It cannot
fail where no threshold on the grid risks more than δ, and is worth little where most sets choose full depth: neither
survives. It does not apply to decoder-only models, to random weights, nor to a model without room for the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.calibration_promises import risk_shown, set_share_leg
from emad_ref.claims.early_exit_answers import (
    EXIT_TASKS,
    answer_on_items,
    inapplicable_leg,
    missing_task_legs,
    undecided_leg,
)
from emad_ref.measurements.early_exits import TextConsistency
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.record import Bools
from emad_ref.statistics.legs import LegTest, combine_verdict, count_leg, decide_legs
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.risk import select_threshold

THRESHOLDS = (0.99, 0.9, 0.7, 0.4, 0.1)  # of softmax response, strict to loose
ENOUGH = 0.5  # share of sets that must choose an exit for the promise to be worth something


@dataclass(frozen=True)
class PromiseEvidence:
    """``consistency``: by task, of a model of ``layers`` blocks; ``missing``: task that could not be asked → why."""

    consistency: Mapping[str, TextConsistency]
    layers: int
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PromiseCounts:
    """What became of the promise, set by set: numbers of sets.

    ``exiting``: chose a threshold at all. ``broken``, ``safe``: whose choice is shown to risk more than δ, or less.
    ``seen``: whose choice risks at most δ as the pool has it. ``saved``: blocks per token, mean over sets.
    """

    sets: int
    exiting: int
    broken: int
    safe: int
    seen: int
    saved: float


def decide(found: PromiseEvidence, asked: ClaimContext) -> Verdict:
    """One leg per task: the share of calibration sets whose choice kept the promise, against 1 − ε."""
    delta = asked.claim.thresholds["tolerance"]
    tests: list[LegTest] = []
    beside = missing_task_legs(found.missing)
    for task, each in found.consistency.items():
        name, (more, less) = f"{task}, δ={delta:g}", risk_shown(each.pool, delta)
        kept = promise_counts(each, more, less, found.layers, asked)
        if (leg := _undecidable_promise_leg(name, each, more, kept, asked)) is not None:
            beside.append(leg)
        else:
            tests.append(_promise_leg(name, kept, asked))
        beside += _promise_worth_legs(task, each, kept, asked.claim.unit)
    return combine_verdict(asked.claim, asked.model, [*decide_legs(tests, asked.other_legs), *beside])


def promise_counts(each: TextConsistency, more: Bools, less: Bools, layers: int, asked: ClaimContext) -> PromiseCounts:
    """Let every set choose, and look the choices up."""
    delta, level = asked.claim.thresholds["tolerance"], 1 - asked.claim.thresholds["coverage"]
    chosen = [select_threshold(losses, each.mean_exit, layers, tolerance=delta, level=level) for losses in each.sets]
    exiting = [index for one in chosen if (index := one.certificate.index) is not None]
    full, risk = len(chosen) - len(exiting), each.pool.mean(axis=0)
    return PromiseCounts(
        len(chosen),
        len(exiting),
        int(more[exiting].sum()),
        full + int(less[exiting].sum()),
        full + int((risk[exiting] <= delta).sum()),
        sum(one.blocks_saved for one in chosen) / max(1, len(chosen)),
    )


def _undecidable_promise_leg(
    name: str, each: TextConsistency, more: Bools, kept: PromiseCounts, asked: ClaimContext
) -> Leg | None:
    """Why these items could not falsify the claim, or let it survive, whatever the truth; None where they could."""
    delta, items, least = asked.claim.thresholds["tolerance"], len(each.pool), asked.claim.minimum.get("items", 0)
    if items < least:
        return undecided_leg(name, f"{items} items, at least {least} are needed", items)
    if not kept.sets:
        return undecided_leg(name, "too few items for a calibration set", items)
    if kept.broken:
        return None
    worst = each.pool.mean(axis=0).max()
    if worst <= delta:
        return inapplicable_leg(name, f"no threshold differs by more than {worst:.3f}: nothing could break", items)
    if not more.any():
        return undecided_leg(name, f"no threshold is shown to differ by more than {delta:g} on {items} items", items)
    if kept.exiting < ENOUGH * kept.sets:
        return undecided_leg(name, f"{kept.exiting} of {kept.sets} sets certify any exit, half are needed", kept.sets)
    return None


def _promise_leg(name: str, kept: PromiseCounts, asked: ClaimContext) -> LegTest:
    """Of the sets that are sure to have kept or broken the promise."""
    counts = {"sure": kept.safe, "not_so": kept.broken, "seen": kept.seen}
    least, claim = asked.claim.thresholds["coverage"], asked.claim
    return set_share_leg(name, kept.sets, **counts, least=least, unit=claim.unit, minimum=claim.minimum)


def _promise_worth_legs(task: str, each: TextConsistency, kept: PromiseCounts, unit: str) -> list[Leg]:
    """What the promise is worth: whether any exit is chosen, what it saves, and how each threshold differs."""
    legs = [
        count_leg(f"{task}: sets that chose any exit", kept.exiting / max(1, kept.sets), kept.sets, unit),
        count_leg(f"{task}: blocks saved per token", kept.saved, kept.sets, "blocks"),
    ]
    for threshold, loss, depth in zip(THRESHOLDS, each.pool.mean(axis=0), each.mean_exit, strict=True):
        name, said = f"{task}, λ={threshold:g}: difference from full depth", f"mean exit {depth:.2f}"
        legs.append(count_leg(name, loss, len(each.pool), "D", said))
    return legs


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under softmax response at each threshold, compared with the text of full depth."""
    exits = evidence.exits

    def judged() -> Verdict:
        found = {task: exits.consistency(task, THRESHOLDS) for task in exits.tasks}
        return decide(PromiseEvidence(found, exits.subject.stepper.layers, exits.missing), asked)

    return answer_on_items(evidence, asked, judged)


QUESTIONS = (Question("EE-7", "model", answer, legs=lambda study, layers: EXIT_TASKS, decide=decide),)
