"""Isolation: the decoder leaves the judge's model unchanged, and the work it counts is the work that runs."""

from __future__ import annotations

import pytest

from pytest_emad.audit.finding import Finding
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import require_unchanged_weights
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate

NEW, ROWS, LENGTH = 8, 2, 8


@pytest.mark.parametrize("kind", ["full depth", "probing"])
def test_the_judges_model_is_left_alone(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, kind: str
) -> None:
    """A decoder changes no weight; the end of the run hashes the weights once more."""
    subject = emad_evidence.subject
    point = subject.full_depth_point if kind == "full depth" else emad_evidence.replay_validity.probing_point
    prompts = subject.make_equal_prompts(ROWS, LENGTH)
    before = subject.generate_greedy(prompts, NEW)
    with require_unchanged_weights(subject.loaded), subject.open_decoder(point, max_rows=ROWS) as decoder:
        decoder.generate(prompts, NEW, frozenset())
    alike = subject.generate_greedy(prompts, NEW) == before
    detail = f"the model's own generate repeats {alike.sum()} of its {alike.size} tokens"
    emad_audit(Finding("model left alone", bool(alike.all()), detail, n=alike.size, ties=0))


def test_counted_work_is_the_work_that_runs(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_record: Recorder
) -> None:
    """Unobservable work is recorded as undecided and fails nothing: ``suites/cost`` judges it by time."""
    seen = emad_evidence.flop_verification.observed_finding
    if seen.passed is None:
        emad_record.record_audit(seen)
    else:
        emad_audit(seen)
