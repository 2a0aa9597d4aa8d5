"""The lossless mode timed: what it emits is the model's own, what is not is named, and other ways stand beside."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from emad_ref.claims import emad_x4
from emad_ref.measurements.latency import ADAPTIVE, FULL, GENERATE
from emad_ref.measurements.study import BUDGETS
from emad_ref.screening.drafts import COPIES_ALONE, LENS_DRAFTS, LOOKUP, OWN_HEAD_DRAFTS, AfterPrompt
from tests.unit.evidence.test_beyond import answered, evidence_with, found_exit

BRIEF = replace(BUDGETS["smoke"], pairs=3, batch_sizes=(1, 2), prompt_tokens=8, new_tokens=6)


PREDICTED = [AfterPrompt(prompt, 64, 7104, 0.7, 3.0, 1e-3, fast * 1e-3) for prompt, fast in ((16, 2.5), (64, 1.5))]


def test_every_arm_emits_the_models_own_tokens_and_a_changed_one_is_named(tmp_path: Path) -> None:
    screened = {"drafts": {"after": [asdict(row) for row in PREDICTED]}}
    evidence = evidence_with(tmp_path, replace(found_exit(), screened=screened))
    evidence.subject.budget = BRIEF
    drafted = evidence.self_speculation
    assert list(drafted.timed) == [1, 2]
    assert set(drafted.timed[1].seconds) == set(drafted.timed[2].seconds) == {FULL, ADAPTIVE, GENERATE}
    assert set(drafted.beside.seconds) == {ADAPTIVE, LOOKUP, OWN_HEAD_DRAFTS}
    for rows in (1, 2):
        assert drafted.checked(rows).passed, drafted.checked(rows).detail
        assert 0 < drafted.accepted_share(rows) <= 1
    (audited, *_) = drafted.timed[2].audited
    record = drafted.timed[2].outputs[ADAPTIVE][audited]
    record.emitted[0] = (record.emitted[0] + 1) % 101
    finding = drafted.checked(2)
    assert finding.passed is False
    assert finding.detail.startswith("adaptive, row 0")
    answer = answered(evidence, "EMAD-X4")
    verdict, (note,) = answer.verdict, answer.exhibits.notes
    assert "timed drafts of the exit, 8 prompt + 6 new tokens, 3 pairs in this process alone (the budget" in note
    assert verdict.verdict == "falsified"
    assert any(leg.outcome == "falsified" and leg.name == "batch 2: timed requests" for leg in verdict.legs)
    assert {f"batch 1, against {way}" for way in (LOOKUP, OWN_HEAD_DRAFTS)} <= {leg.name for leg in verdict.legs}
    (predicted,) = [leg for leg in verdict.legs if leg.name == emad_x4.PREDICTED]
    assert (predicted.outcome, predicted.estimate) == ("measured", PREDICTED[0].fast), "8 tokens are nearer to 16"


def test_of_a_way_that_copies_and_drafts_either_half_stands_beside(tmp_path: Path) -> None:
    """And what they emit is looked at, too."""
    found = found_exit()
    assert found.drafting is not None
    evidence = evidence_with(tmp_path, replace(found, drafting=replace(found.drafting, copied=3)))
    evidence.subject.budget = replace(BRIEF, batch_sizes=(1,), new_tokens=12)
    beside = evidence.self_speculation.beside
    assert set(beside.seconds) == {ADAPTIVE, LOOKUP, OWN_HEAD_DRAFTS, LENS_DRAFTS, COPIES_ALONE}
    assert evidence.self_speculation.checked(1).passed
    (audited, *_) = beside.audited
    beside.outputs[COPIES_ALONE][audited][0, 2] += 1  # type: ignore[index]
    finding = evidence.self_speculation.checked(1)
    assert finding.passed is False
    assert finding.detail.startswith(f"{COPIES_ALONE}, row 0")


def test_an_exit_that_holds_no_way_to_draft_leaves_the_row_without_object(tmp_path: Path) -> None:
    found = replace(found_exit(), drafting=None)
    verdict = answered(evidence_with(tmp_path, found), "EMAD-X4").verdict
    assert (verdict.verdict, verdict.reason) == (
        "not applicable", "the exit holds no way to draft: none was predicted to pay"
    )  # fmt: skip


def test_what_a_point_with_copies_emitted_while_the_clock_ran_is_decoded_again(tmp_path: Path) -> None:
    evidence = evidence_with(tmp_path, found_exit())
    evidence.subject.budget = replace(BRIEF, batch_sizes=(2,))
    point, stopwatch = evidence.learned_exit.point, evidence.latency
    assert stopwatch.checked(stopwatch.timed(point)[2], point).passed
    (audited, *_) = stopwatch.timed(point)[2].audited
    record = stopwatch.timed(point)[2].outputs[ADAPTIVE][audited]
    record.emitted[1] = (record.emitted[1] + 1) % 101
    finding = stopwatch.checked(stopwatch.timed(point)[2], point)
    assert finding.passed is False
    assert "adaptive, row 1" in finding.detail
    assert "but our own decoder" in finding.detail
