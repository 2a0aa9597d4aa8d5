"""EMAD-F1 (falsifier): at every point put forward that saves ≥ 15 % of FLOPs, does quality hold?"""

from __future__ import annotations

import pytest

from emad_ref.verdict.judge import judge_f1, not_applicable, unmeasured
from pytest_emad.family import other_legs


def premise(evidence, claim):
    """The verdict where quality cannot be judged, else None."""
    if reason := evidence.without_quality:
        return not_applicable(claim, evidence.name, reason)
    if evidence.bridge.passed is False:
        return unmeasured(claim, evidence.name, f"replay does not speak for this decoder: {evidence.bridge.detail}")
    return None


@pytest.mark.emad(claim="EMAD-F1")
def test_quality_holds_at_every_point_put_forward(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    evidence, claim = emad_evidence, emad_register["EMAD-F1"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = premise(evidence, claim)
        if verdict is None:
            others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
            points = [evidence.at(loss) for loss in evidence.losses]
            verdict = judge_f1(points, claim, evidence.name, emad_rng, other_legs=others)
            evidence.report_points(emad_record, verdict)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


@pytest.mark.emad(claim="EMAD-F1-literal")
def test_quality_holds_at_any_point_of_the_sweep(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    evidence, claim = emad_evidence, emad_register["EMAD-F1-literal"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = premise(evidence, claim)
        if verdict is None:
            others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
            points = [evidence.at(loss, tasks=evidence.replayed_tasks) for loss in evidence.emad_sweep]
            verdict = judge_f1(points, claim, evidence.name, emad_rng, other_legs=others, shown=20)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)
