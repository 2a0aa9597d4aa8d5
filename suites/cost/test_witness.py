"""Evidence for FLOP counts: observed matrix products, shorter times, or a claim alone. No test may run beside it."""

from __future__ import annotations

import pytest

from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.study import FLOP_EVIDENCE
from pytest_emad.run.options import RunSettings
from pytest_emad.run.recorder import Recorder
from pytest_emad.run.suite_support import AuditFindingGate


@pytest.mark.emad(measures=True)
def test_flop_evidence_grade_suffices(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_record: Recorder, emad_settings: RunSettings
) -> None:
    witnessed, asked = emad_evidence.flop_verification, emad_settings.evidence
    if witnessed.finding.passed is None:  # no complaint by itself: ``--emad-evidence`` says what is enough
        emad_record.record_audit(witnessed.finding)
    else:
        emad_audit(witnessed.finding)
    detail = f"{emad_evidence.name}: FLOP counts are {witnessed.evidence_grade}: {witnessed.finding.detail}"
    emad_record.record_note(detail)
    if FLOP_EVIDENCE.index(witnessed.evidence_grade) < FLOP_EVIDENCE.index(asked):
        pytest.fail(f"{detail}; --emad-evidence {asked} asks for more", pytrace=False)
