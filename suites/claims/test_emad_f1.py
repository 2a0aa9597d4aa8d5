"""EMAD-F1 (falsifier): at every point put forward that saves ≥ 15 % of FLOPs, does quality hold?"""

from __future__ import annotations

import pytest

from emad_ref.verdict.judge import judge_f1, not_applicable, unmeasured


@pytest.mark.emad(claim="EMAD-F1")
def test_quality_holds_at_every_point_put_forward(emad_evidence, emad_record, emad_register, emad_rng):
    evidence, claim = emad_evidence, emad_register["EMAD-F1"]
    if reason := evidence.without_quality:
        emad_record.claim(not_applicable(claim, evidence.name, reason), evidence.corpus, evidence.fingerprint)
        return
    if evidence.bridge.passed is False:
        reason = f"replay does not speak for this decoder: {evidence.bridge.detail}"
        emad_record.claim(unmeasured(claim, evidence.name, reason), evidence.corpus, evidence.fingerprint)
        return
    verdict = judge_f1([evidence.at(loss) for loss in evidence.losses], claim, evidence.name, emad_rng)
    evidence.report_points(emad_record, verdict)
    emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


@pytest.mark.emad(claim="EMAD-F1-literal")
def test_quality_holds_at_any_point_of_the_sweep(emad_evidence, emad_record, emad_register, emad_rng):
    evidence, claim = emad_evidence, emad_register["EMAD-F1-literal"]
    if reason := evidence.without_quality:
        emad_record.claim(not_applicable(claim, evidence.name, reason), evidence.corpus, evidence.fingerprint)
        return
    points = [evidence.at(loss, tasks=evidence.replayed_tasks) for loss in evidence.emad_sweep]
    verdict = judge_f1(points, claim, evidence.name, emad_rng, shown=20)
    emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)
