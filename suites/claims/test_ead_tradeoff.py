"""EAD-F1, EAD-F2: does switching keep the paper's share of the score at its savings, and beat what loses nothing?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.decoding.switching import LARGE, SMALL
from emad_ref.verdict.interval import accuracy_drop, log_ratio
from emad_ref.verdict.legs import counted, decided, estimated, not_applicable, row, unmeasured, unseen, weighed
from pytest_emad.family import other_legs
from pytest_emad.pairing import CORPUS, DRAFTED, described, retained, table_row

RESULTS = ("llama", "qwen")  # the paper's two: names of thresholds


@pytest.mark.emad(claim="EAD-F1")
def test_most_of_the_score_is_kept_at_the_papers_savings(
    emad_pair, emad_record, emad_register, emad_rng, emad_settings
):
    pair, claim = emad_pair, emad_register["EAD-F1"]
    with emad_record.unless_unsupported(claim.id, pair.name):
        if reason := pair.premise():
            verdict = not_applicable(claim, pair.name, reason)
        else:
            emad_record.note(pair.note)
            tests, beside = [], []
            for task in pair.tasks:
                for result in RESULTS:
                    judge_result(pair, claim, task, result, emad_rng, tests, beside)
                tried = [(described(r), pair.switched(r, task, "validate", pair.size.tried)) for r in pair.tried(task)]
                emad_record.table(f"rules tried on {task}", pair.name, [table_row(*one) for one in tried])
                found = table(pair, claim, task)
                emad_record.table(f"score against cost on {task}", pair.name, found, figure="score against cost")
            others = other_legs(claim.id, emad_settings, emad_register, pair.large.stepper.layers)
            verdict = row(claim, pair.name, [*short_of_saving(decided(tests, others), beside), *beside])
        emad_record.claim(verdict, corpus=CORPUS, fingerprint=pair.fingerprint)


def judge_result(pair, claim, task, result, rng, tests, beside):
    """Judge the rule that validation put forward for a saving: its score on other items, and what it really saves."""
    wanted, kept = (claim.thresholds[f"{what}_{result}"] for what in ("saving", "retained"))
    rule = pair.chosen(task, wanted)
    name = f"{task}, −{wanted:.1%}"
    if rule is None:
        beside.append(unseen(name, "no rule tried on validation saves as much"))
        return
    done, reference = pair.judged(rule, task), pair.alone(LARGE, task, "evaluate", pair.size.judged)
    estimate = retained(done.right, reference.right, kept, rng)
    tests.append(weighed(name, estimate, "below", kept, claim.minimum, "items"))
    saved = counted(f"{name}: saving", pair.saving(done.large_share), len(done.right), "saving", described(rule))
    beside.append(replace(saved, threshold=wanted))


def short_of_saving(legs, beside):
    """A score that is kept at less than the paper's saving shows nothing; one that is lost there shows all the more."""
    saved = {leg.name: leg for leg in beside}
    for leg in legs:
        at = saved[f"{leg.name}: saving"]
        if leg.outcome == "survived" and at.estimate < at.threshold:
            yield replace(leg, outcome="inconclusive", reason=f"saves only {at.estimate:.1%} on the judged items")
        else:
            yield leg


def table(pair, claim, task):
    """Both models alone, every rule judged, speculative decoding: the same items, every number from records."""
    arguments = (task, "evaluate", pair.size.judged)
    rules = {pair.chosen(task, claim.thresholds[f"saving_{result}"]) for result in RESULTS} - {None}
    rows = {"small alone": pair.alone(SMALL, *arguments)}
    rows |= {f"EAD, {described(rule)}": pair.judged(rule, task) for rule in rules}
    rows |= {"large alone": pair.alone(LARGE, *arguments)}
    rows |= {f"speculative, k = {DRAFTED}": pair.speculated(*arguments)}
    return [table_row(name, done) for name, done in rows.items()]


@pytest.mark.emad(claim="EAD-F2", measures=True)
def test_switching_beats_speculation(emad_pair, emad_record, emad_register, emad_settings):
    """The rule put forward, whatever it scores, against speculation, which scores as the large model: batch 1."""
    pair, claim = emad_pair, emad_register["EAD-F2"]
    with emad_record.unless_unsupported(claim.id, pair.name):
        if reason := pair.premise():
            verdict = not_applicable(claim, pair.name, reason)
        else:
            verdict = judged_speed(pair, claim, emad_settings, emad_register)
        emad_record.claim(verdict, corpus=CORPUS, fingerprint=pair.fingerprint)


def judged_speed(pair, claim, settings, register):
    timings, results = pair.rivals
    seconds, switched, speculated = timings.seconds, pair.spent(results["EAD"]), pair.spent(results["speculative"])
    if switched is None or speculated is None:
        return unmeasured(claim, pair.name, "a decoder of the pair does not count its work")
    bounds = claim.thresholds["speedup_ratio"], claim.thresholds["flop_ratio"]
    time = log_ratio(seconds["speculative"], seconds["EAD"], threshold=bounds[0])
    work = log_ratio(speculated, switched, threshold=bounds[1])
    tests = [
        weighed("wall-clock", time, "below", bounds[0], claim.minimum, "pairs"),
        weighed("FLOPs", replace(work, unit="× fewer FLOPs"), "below", bounds[1], claim.minimum, "pairs"),
    ]
    task = pair.timed_task
    rule = pair.put_forward(task)
    beside = [
        counted(f"{arm}: tokens per second", pair.timed_new / np.median(seconds[arm]), len(seconds[arm]), "tokens/s")
        for arm in ("large", "EAD", "speculative")
    ]
    lost = accuracy_drop(
        pair.alone(LARGE, task, "evaluate", pair.size.judged).right, pair.judged(rule, task).right, threshold=0.0
    )
    beside.append(estimated(f"score lost on {task} by {described(rule)}; speculation loses none", lost))
    others = other_legs(claim.id, settings, register, pair.large.stepper.layers)
    return row(claim, pair.name, [*decided(tests, others), *beside])
