"""EE-3, EE-9, EE-10, EE-12, EE-13, EE-15: which rule exits earlier, and what becomes of the score; paired by item."""

from __future__ import annotations

import pytest

from emad_ref.policy.early_exit import PRUNINGS
from emad_ref.readout.subset import adaptive_size
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.legs import counted, decided, estimated, judge_side, not_applicable, row, weighed
from pytest_emad.exits import PRETRAINED, Exits, decide, difference, earlier, premise
from pytest_emad.family import other_legs

LEAST_SOLVED = 0.05  # of the score at full depth, below which no exit can be said to keep it


@pytest.mark.emad(claim="EE-3")
def test_jsd_exits_earlier_than_softmax_response(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    """JSD cannot leave at the minimum layer itself, where there is nothing to contrast with: a block given away."""
    evidence, claim = emad_evidence, emad_register["EE-3"]

    def judged():
        tests, margin = [], claim.thresholds["score_drop"]
        for task, minimum in settings_of(evidence):
            jsd, softmax = (evidence.exits.answered(task, rule, minimum) for rule in ("JSD", "softmax"))
            where = f"{task}, j={minimum}"
            sooner = blocks(evidence, jsd, softmax, claim.thresholds["blocks_earlier"], emad_rng)
            tests.append(
                weighed(f"{where}: exit", sooner, "below", claim.thresholds["blocks_earlier"], claim.minimum, "items")
            )
            lost = difference(softmax.score, jsd.score, threshold=margin, rng=emad_rng, unit="score lost")
            tests.append(weighed(f"{where}: score", lost, "above", margin, claim.minimum, "items"))
        others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
        return row(claim, evidence.name, [*decided(tests, others), *evidence.exits.missing])

    decide(evidence, emad_record, claim, judged)


@pytest.mark.emad(claim="EE-9")
def test_adaptive_pruning_exits_earlier_than_fixed_and_decaying(
    emad_evidence, emad_record, emad_register, emad_rng, emad_settings
):
    evidence, claim = emad_evidence, emad_register["EE-9"]

    def judged():
        found, beside, least = {}, [], claim.thresholds["blocks_earlier"]
        for task, minimum in settings_of(evidence):
            adaptive = evidence.exits.answered(task, "JSD, adaptive", minimum)
            for rival in ("fixed", "decaying"):
                other = evidence.exits.answered(task, f"JSD, {rival}", minimum)
                where = f"{task}, j={minimum}, against {rival}"
                found[f"{where}: exit"] = blocks(evidence, adaptive, other, least, emad_rng)
                gained = difference(adaptive.score, other.score, threshold=0.0, rng=emad_rng, unit="score gained")
                beside.append(estimated(f"{where}: score", gained))
        emad_record.table("tokens kept by pruning, per layer", evidence.name, sizes(evidence))
        return above(claim, evidence, found, least, beside, emad_settings, emad_register)

    decide(evidence, emad_record, claim, judged)


@pytest.mark.emad(claim="EE-10")
def test_weighted_contrast_exits_about_when_softmax_response_does(emad_evidence, emad_record, emad_register, emad_rng):
    evidence, claim = emad_evidence, emad_register["EE-10"]

    def judged():
        legs = []
        for task, minimum in settings_of(evidence):
            weighted, softmax = (evidence.exits.answered(task, r, minimum) for r in ("weighted contrast", "softmax"))
            where = f"{task}, j={minimum}"
            legs.append(estimated(f"{where}: exit", blocks(evidence, weighted, softmax, 0.0, emad_rng)))
            gained = difference(weighted.score, softmax.score, threshold=0.0, rng=emad_rng, unit="score gained")
            legs.append(estimated(f"{where}: score", gained))
        return row(claim, evidence.name, legs)

    decide(evidence, emad_record, claim, judged)


@pytest.mark.emad(claim="EE-12")
def test_state_copying_keeps_the_score_of_deferred_fill(emad_evidence, emad_record, emad_register, emad_rng):
    """The same rule and threshold under both; what copies change may move later exits, so both are reported."""
    evidence, claim = emad_evidence, emad_register["EE-12"]

    def judged():
        legs, minimum = [], evidence.exits.minima[0]
        for task in evidence.exits.tasks:
            for rule in ("softmax", "JSD"):
                copied = evidence.exits.answered(task, rule, minimum)
                exact = evidence.exits.answered(task, rule, minimum, schedule="free_deferred")
                where = f"{task}, {rule}, j={minimum}"
                gained = difference(copied.score, exact.score, threshold=0.0, rng=emad_rng, unit=claim.unit)
                legs.append(estimated(f"{where}: score", gained))
                legs.append(estimated(f"{where}: exit", blocks(evidence, copied, exact, 0.0, emad_rng)))
                same = sum(a == b for a, b in zip(copied.texts, exact.texts, strict=True))
                legs.append(counted(f"{where}: same text", same / len(copied.texts), len(copied.texts), "share"))
        return row(claim, evidence.name, legs)

    decide(evidence, emad_record, claim, judged)


@pytest.mark.emad(claim="EE-13")
def test_tuned_models_exit_earlier(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    """The same items, rule and threshold, before and after tuning."""
    evidence, claim = emad_evidence, emad_register["EE-13"]

    def judged() -> Verdict:
        twin = evidence.exits.twin
        if not isinstance(twin, Exits):
            return not_applicable(claim, evidence.name, twin)
        before, after = (evidence.exits, twin) if evidence.name == PRETRAINED else (twin, evidence.exits)
        found, beside, least = {}, [], claim.thresholds["blocks_earlier"]
        for task, minimum in settings_of(evidence):
            early, late = (side.answered(task, "softmax", minimum) for side in (after, before))
            found[f"{task}, j={minimum}"] = blocks(evidence, early, late, least, emad_rng)
            for name, side in (("pre-trained", late), ("tuned", early)):
                where = f"{task}, j={minimum}, {name}"
                beside.append(counted(f"{where}: mean exit", side.mean_exit, len(side.texts), "blocks"))
                beside.append(counted(f"{where}: score", side.score.mean(), len(side.texts), "score"))
        return above(claim, evidence, found, least, beside, emad_settings, emad_register)

    decide(evidence, emad_record, claim, judged)


@pytest.mark.emad(claim="EE-15")
def test_jsd_improves_on_no_exiting(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    evidence, claim = emad_evidence, emad_register["EE-15"]

    def judged():
        found, beside, least = {}, [], claim.thresholds["score_gain"]
        for task in evidence.exits.tasks:
            full = evidence.exits.under(task, evidence.exits.full)
            beside.append(counted(f"{task}: score at full depth", full.score.mean(), len(full.texts), "score"))
            for minimum in evidence.exits.minima:
                jsd = evidence.exits.answered(task, "JSD", minimum)
                found[f"{task}, j={minimum}"] = difference(
                    jsd.score, full.score, threshold=least, rng=emad_rng, unit=claim.unit
                )
        return above(claim, evidence, found, least, beside, emad_settings, emad_register)

    decide(evidence, emad_record, claim, judged)


def test_table_of_early_exits(emad_evidence, emad_record, emad_register):
    """Every rule, minimum layer and task decoded for the claims: exit, score, FLOPs apart and together."""
    evidence = emad_evidence
    if missing := premise(evidence, emad_register["EE-3"]):
        pytest.skip(f"{missing.verdict} ({missing.reason})")
    rows = evidence.exits.table()
    emad_record.table(f"early exits on {evidence.exits.corpus}", evidence.name, rows, figure="FLOPs by rule")
    poor = {r["task"] for r in rows if r["rule"] == "full depth" and r["score"] < LEAST_SOLVED}
    if poor:
        emad_record.note(f"{evidence.name}: full depth scores below {LEAST_SOLVED} on {', '.join(sorted(poor))}")
    assert all(r["mean exit"] <= evidence.stepper.layers for r in rows)


# ---------------------------------------------------------------- shared by the rows


def settings_of(evidence):
    """(task, minimum layer) of every comparison."""
    return [(task, minimum) for task in evidence.exits.tasks for minimum in evidence.exits.minima]


def blocks(evidence, sooner, later, threshold, rng):
    return earlier(sooner, later, layers=evidence.stepper.layers, threshold=threshold, rng=rng)


def above(claim, evidence, found, least, beside, settings, register):
    """A row that holds where every estimate is shown above the threshold."""
    others = other_legs(claim.id, settings, register, evidence.stepper.layers)
    return judge_side(
        claim,
        evidence.name,
        found,
        "below",
        least,
        "items",
        other_legs=others,
        beside=[*beside, *evidence.exits.missing],
    )


def sizes(evidence):
    """k of each pruning after the least minimum layer; the adaptive one if nothing, or everything, were sure."""
    layers, vocabulary = evidence.stepper.layers, evidence.stepper.vocabulary
    minimum = evidence.exits.minima[0]
    fixed, decaying = (PRUNINGS[name](minimum, layers, vocabulary).kept for name in ("fixed", "decaying"))
    shrink = PRUNINGS["adaptive"](minimum, layers, vocabulary).shrink
    return [
        {
            "layer": minimum + 1 + i,
            "fixed": fixed[i],
            "decaying": decaying[i],
            "adaptive, unsure": adaptive_size(vocabulary, shrink, 0.0),
            "adaptive, sure": adaptive_size(vocabulary, shrink, 1.0),
        }
        for i in range(len(fixed))
    ]
