"""Rows of identities, asked of a real model through its decoder: EMAD-E2, EMAD-E5, EMAD-E3, EMAD-E13."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.claims import emad_e2, emad_e3, emad_e5
from emad_ref.claims.base import Answer, ClaimContext, Question, ask, question_of
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.run_resources import RunResources
from emad_ref.measurements.study import BUDGETS, Study
from emad_ref.models.loading import LoadedModel, load
from emad_ref.statistics.verdicts import load_register
from tests.decoders.foreign import ForeignDecoder

REGISTER = load_register()
STUDY = Study(corpus="self", budget=replace(BUDGETS["smoke"], examples=3))


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


def answered(question: Question[ModelMeasurements], loaded: LoadedModel, host: RunResources | None = None) -> Answer:
    evidence = ModelMeasurements(loaded, STUDY, host or RunResources())
    return ask(question, evidence, ClaimContext(REGISTER[question.claim], evidence.name, np.random.default_rng(0)))


def test_logits_at_drawn_depths_are_the_full_models(nano: LoadedModel):
    answer = answered(question_of("EMAD-E2"), nano)
    assert answer.verdict.verdict == "survived"
    assert answer.verdict.n == STUDY.budget.examples * (1 + emad_e2.FED)
    assert (answer.corpus, answer.fingerprint) == ("", nano.fingerprint)


def test_depths_that_rise_are_made_to_fall_and_the_prompt_is_compared_too(nano: LoadedModel):
    evidence = ModelMeasurements(nano, STUDY, RunResources())
    some, same = emad_e2.differences_at(evidence, [4, 2, 3, 1], 7), emad_e2.differences_at(evidence, [4, 2, 2, 1], 7)
    assert some.shape == (5,)
    assert some.tolist() == same.tolist()


class Gapped(WalkedDecoder):
    """Says less than it decided: every logit is off by a hundredth."""

    def start(self, prompts):
        session, step = super().start(prompts)
        return session, replace(step, logits=step.logits + 0.01)


def test_one_wrong_position_falsifies(nano: LoadedModel):
    host = RunResources(make_decoder=lambda request: Gapped(nano.stepper, request.point))
    answer = answered(question_of("EMAD-E2"), nano, host)
    assert answer.verdict.verdict == "falsified"
    assert f"{STUDY.budget.examples} of {answer.verdict.n} comparisons" in answer.verdict.reason


def test_depth_sequences_may_come_from_elsewhere(nano: LoadedModel):
    """As the suite does it: Hypothesis draws, the question decides."""
    evidence = ModelMeasurements(nano, STUDY, RunResources())
    given = ClaimContext(REGISTER["EMAD-E2"], "m", np.random.default_rng(0))
    assert emad_e2.answered(evidence, given, []).verdict.verdict == "unmeasured"
    drawn = [emad_e2.differences_at(evidence, [1] * emad_e2.FED, 0)]
    assert emad_e2.answered(evidence, given, drawn).verdict.verdict == "survived"


def test_executed_blocks_are_the_sum_of_depths(nano: LoadedModel):
    answer = answered(question_of("EMAD-E5"), nano)
    assert answer.verdict.verdict == "survived"
    *legs, evidence = answer.verdict.legs
    moved, executed, decided = (leg.estimate for leg in legs)
    assert evidence.name == "evidence: witnessed"
    assert moved == 0.0
    assert 0 < executed == decided < 1
    assert [leg.n for leg in legs] == [emad_e5.REQUESTS] * 3
    assert (answer.corpus, answer.fingerprint) == ("self", nano.fingerprint)


def test_work_that_is_not_counted_cannot_be_compared(nano: LoadedModel):
    answer = answered(
        question_of("EMAD-E5"),
        nano,
        RunResources(lambda request: ForeignDecoder(request.model.load().model, request.point)),
    )
    assert answer.verdict.verdict == "not applicable"
    assert answer.verdict.reason == "the decoder does not count its work"


def test_every_estimator_is_a_leg_on_every_geometry_at_strides_that_leave_a_probe(nano: LoadedModel):
    legs = [leg.name for leg in answered(question_of("EMAD-E3"), nano).verdict.legs]
    assert len(legs) == 5 * 2 * len(emad_e3.GEOMETRIES)  # four layers leave no probe at stride 4 or 8
    assert "llama-7b, full, stride 8" in legs
    assert emad_e3.decide(
        emad_e3.ProbeCostEvidence({}), ClaimContext(REGISTER["EMAD-E3"], "m", np.random.default_rng(0))
    ).reason


def test_the_premise_is_the_geometrys(nano: LoadedModel):
    said = {True: "survived", False: "falsified"}
    assert answered(question_of("EMAD-E13"), nano).verdict.verdict == said[nano.geometry.tied]
