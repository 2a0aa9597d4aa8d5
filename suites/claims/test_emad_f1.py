"""EMAD-F1 (falsifier): at every point put forward that saves ≥ 15 % of FLOPs, does quality hold?"""

from __future__ import annotations

import pytest

from emad_ref.verdict.judge import judge_f1
from pytest_emad.family import other_legs
from pytest_emad.harnessed import report_tasks
from pytest_emad.pointrows import report_points
from pytest_emad.premises import quality_premise


@pytest.mark.emad(claim="EMAD-F1")
def test_quality_holds_at_every_point_put_forward(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    evidence, claim = emad_evidence, emad_register["EMAD-F1"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = quality_premise(evidence, claim)
        if verdict is None:
            others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
            points = [evidence.scored.judged(loss) for loss in evidence.losses]
            verdict = judge_f1(points, claim, evidence.name, emad_rng, other_legs=others)
            verdict = evidence.scored.with_unmeasured(verdict, claim)
            report_points(evidence, emad_record, verdict)
            report_tasks(evidence, emad_record)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


@pytest.mark.emad(claim="EMAD-F1-literal")
def test_quality_holds_at_any_point_of_the_sweep(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    evidence, claim = emad_evidence, emad_register["EMAD-F1-literal"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = quality_premise(evidence, claim)
        if verdict is None:
            others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
            points = [evidence.at(loss, tasks=evidence.scored.replayed) for loss in evidence.emad_sweep]
            verdict = judge_f1(points, claim, evidence.name, emad_rng, other_legs=others, shown=20)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)
