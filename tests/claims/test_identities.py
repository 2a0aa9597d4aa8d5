"""EMAD-E2, E3, E5, E12 and E13 (identities and arithmetic) on a real model and its decoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.trace import concatenate_traces, trace_stepwise
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import fixed_entropy_point
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.quantisation import int8_copy
from emad_ref.point import full_depth
from emad_ref.protocol import Unsupported
from emad_ref.replay.losses import replay_losses
from pytest_emad.audit.model_lens import ModelLens
from pytest_emad.claims import entropy_premises, identities
from pytest_emad.claims.base import Answer, ClaimContext, Question, answer_question, find_question_of_claim
from pytest_emad.claims.identities import (
    INT8_FED,
    Int8AdaptiveDepthEvidence,
    decide_adaptive_depth_on_int8,
    measure_int8_forced_logit_differences,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.statistics.rates import nll_pair_by_document
from pytest_emad.statistics.units import ByDocument, DocumentMembership
from pytest_emad.statistics.verdicts import Leg, load_register
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.mutant import DECLARED_NOISE

REGISTER = load_register()
STUDY = Study(corpus="self", budget=replace(BUDGETS["smoke"], examples=3))


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


def answered(question: Question[ModelMeasurements], loaded: LoadedModel, host: RunResources | None = None) -> Answer:
    evidence = ModelMeasurements(loaded, STUDY, host or RunResources())
    return answer_question(
        question, evidence, ClaimContext(REGISTER[question.claim], evidence.name, np.random.default_rng(0))
    )


def test_logits_at_drawn_depths_are_the_full_models(nano: LoadedModel):
    answer = answered(find_question_of_claim("EMAD-E2"), nano)
    assert answer.verdict.verdict == "survived"
    assert answer.verdict.n == STUDY.budget.examples * (1 + identities.FED)
    assert (answer.corpus, answer.fingerprint) == ("", nano.fingerprint)


def test_depths_that_rise_are_made_to_fall_and_the_prompt_is_compared_too(nano: LoadedModel):
    evidence = ModelMeasurements(nano, STUDY, RunResources())
    some = identities.measure_forced_logit_differences(evidence, [4, 2, 3, 1], 7)
    same = identities.measure_forced_logit_differences(evidence, [4, 2, 2, 1], 7)
    assert some.shape == (5,)
    assert some.tolist() == same.tolist()


class Gapped(WalkedDecoder):
    """A decoder that shows wrong logits: each is off by a hundredth."""

    def start(self, prompts):
        session, step = super().start(prompts)
        return session, replace(step, logits=step.logits + 0.01)


def test_one_wrong_position_falsifies(nano: LoadedModel):
    host = RunResources(make_decoder=lambda request: Gapped(nano.stepper, request.point))
    answer = answered(find_question_of_claim("EMAD-E2"), nano, host)
    assert answer.verdict.verdict == "falsified"
    assert f"{STUDY.budget.examples} of {answer.verdict.n} comparisons" in answer.verdict.reason


@pytest.mark.parametrize(("rounding", "outcome"), [(0.02, "survived"), (0.005, "falsified")])
def test_a_difference_that_the_rounding_of_its_position_explains_does_not_falsify(
    nano: LoadedModel, monkeypatch: pytest.MonkeyPatch, rounding: float, outcome: str
):
    monkeypatch.setattr(ModelLens, "max_rounding_error", lambda self, tokens, layers: rounding)
    host = RunResources(make_decoder=lambda request: Gapped(nano.stepper, request.point))
    assert answered(find_question_of_claim("EMAD-E2"), nano, host).verdict.verdict == outcome


def test_depth_sequences_may_come_from_elsewhere(nano: LoadedModel):
    """As in the suite: Hypothesis draws, the claim decides."""
    evidence = ModelMeasurements(nano, STUDY, RunResources())
    given = ClaimContext(REGISTER["EMAD-E2"], "m", np.random.default_rng(0))
    assert identities.answer_from_differences(evidence, given, []).verdict.verdict == "unmeasured"
    drawn = [identities.measure_forced_logit_differences(evidence, [1] * identities.FED, 0)]
    assert identities.answer_from_differences(evidence, given, drawn).verdict.verdict == "survived"


def test_executed_blocks_are_the_sum_of_depths(nano: LoadedModel):
    answer = answered(find_question_of_claim("EMAD-E5"), nano)
    assert answer.verdict.verdict == "survived"
    *legs, evidence = answer.verdict.legs
    moved, executed, decided = (leg.estimate for leg in legs)
    assert evidence.name == "evidence: witnessed"
    assert moved == 0.0
    assert 0 < executed == decided < 1
    assert [leg.n for leg in legs] == [identities.REQUESTS] * 3
    assert (answer.corpus, answer.fingerprint) == ("self", nano.fingerprint)


def test_work_that_is_not_counted_cannot_be_compared(nano: LoadedModel):
    answer = answered(
        find_question_of_claim("EMAD-E5"),
        nano,
        RunResources(lambda request: ForeignDecoder(request.model.load().model, request.point)),
    )
    assert answer.verdict.verdict == "not applicable"
    assert answer.verdict.reason == "the decoder does not count its work"


def test_every_estimator_is_a_leg_on_every_geometry_at_strides_that_leave_a_probe(nano: LoadedModel):
    verdict = answered(find_question_of_claim("EMAD-E3"), nano).verdict
    legs = [leg.name for leg in verdict.legs]
    assert len(legs) == 5 * 2 * len(entropy_premises.GEOMETRIES)  # four layers leave no probe at stride 4 or 8
    assert "geometry of llama-7b, full, stride 8" in legs
    assert verdict.reason.startswith("18 of 40 legs falsified; ")
    assert verdict.reason.endswith(f"; {nano.name} is too shallow for a probe at these strides")
    assert "worst leg: geometry of pythia-410m" in verdict.reason, "not the model under test"
    assert entropy_premises.decide_probe_cost(
        {}, ClaimContext(REGISTER["EMAD-E3"], "m", np.random.default_rng(0))
    ).reason


def test_the_premise_is_the_geometrys(nano: LoadedModel):
    said = {True: "survived", False: "falsified"}
    assert answered(find_question_of_claim("EMAD-E13"), nano).verdict.verdict == said[nano.geometry.tied]


# ------------------------------------------------------------ EMAD-E12: an int8 copy


def int8_context() -> ClaimContext:
    return ClaimContext(REGISTER["EMAD-E12"], "m", np.random.default_rng(5))


def perplexity_leg(document: DocumentMembership, rates: np.ndarray, tokens: np.ndarray) -> Leg:
    """Make a leg of windows whose NLL rises by ``rates`` nats per token, cut from the documents of these numbers."""
    columns = (rates * tokens, np.zeros(len(rates)), tokens)
    sums = tuple(ByDocument.from_summed_windows(column, document) for column in columns)
    return decide_adaptive_depth_on_int8(
        Int8AdaptiveDepthEvidence((np.zeros(INT8_FED), 1e-4), full_depth(4), 0.5, sums), int8_context()
    ).legs[-1]


def test_windows_of_one_document_are_not_resampled_on_their_own():
    """200 documents of four equal windows: as 800 documents the row would survive, as 200 it is inconclusive."""
    source = np.random.default_rng(1)
    of_each = source.normal(0.0, 0.06, 200)
    rates, tokens = np.repeat(of_each - of_each.mean() + 0.004, 4), np.full(800, 100)
    of_documents = perplexity_leg(DocumentMembership(np.repeat(np.arange(200), 4)), rates, tokens)
    as_if_independent = perplexity_leg(DocumentMembership(np.arange(800)), rates, tokens)
    assert (of_documents.n, as_if_independent.n) == (200, 800)
    assert of_documents.estimate == pytest.approx(as_if_independent.estimate)
    assert (of_documents.outcome, as_if_independent.outcome) == ("inconclusive", "survived")


def test_losses_of_windows_are_summed_within_the_documents_they_were_cut_from(nano: LoadedModel):
    """Three windows of two documents on a real copy: the sums over all tokens stay, the entries are documents."""
    int8, source = int8_copy(nano), np.random.default_rng(3)
    cut = [(9, 0), (5, 0), (7, 1)]
    texts = [
        TokenSequence(source.integers(0, nano.stepper.vocabulary_size, length), document=number)
        for length, number in cut
    ]
    trace = concatenate_traces([trace_stepwise(int8.stepper, text) for text in texts])
    point = fixed_entropy_point(4, (1,), 1e9)
    nll, reference, tokens = nll_pair_by_document(replay_losses(trace, int8.geometry, [point])[1])
    windows = replay_losses(replace(trace, documents=None), int8.geometry, [point]).nats
    assert tokens.values.tolist() == [8 + 4, 6]
    assert nll.values.tolist() == [windows[1, 0] + windows[1, 1], windows[1, 2]]
    assert reference.values.sum() == pytest.approx(windows[0].sum())


def test_forced_depths_are_held_against_the_copys_own_readouts(nano: LoadedModel):
    evidence = ModelMeasurements(nano, Study(corpus="self"), RunResources())
    differences, allowed = measure_int8_forced_logit_differences(evidence, int8_copy(nano))
    assert differences.shape == (INT8_FED,)
    assert 0 <= differences.max() <= allowed == evidence.subject.tolerance
    against_the_original, _ = measure_int8_forced_logit_differences(evidence, nano)
    assert against_the_original.max() <= evidence.subject.tolerance


def test_declared_noise_is_allowed_for(nano: LoadedModel):
    noisy = CATALOGUE["honest-noise"].make
    evidence = ModelMeasurements(nano, Study(corpus="self"), RunResources(make_decoder=noisy))
    differences, allowed = measure_int8_forced_logit_differences(evidence, nano)
    assert evidence.subject.tolerance < differences.max() <= allowed == DECLARED_NOISE


def test_a_decoder_that_declines_is_heard(nano: LoadedModel):
    def declines(request: object) -> None:
        raise Unsupported("no depth from outside")

    evidence = ModelMeasurements(nano, Study(corpus="self"), RunResources(make_decoder=declines))
    with pytest.raises(Unsupported, match="no depth from outside"):
        measure_int8_forced_logit_differences(evidence, int8_copy(nano))


def test_random_weights_have_no_quality_to_keep():
    verdict = answer_question(
        find_question_of_claim("EMAD-E12"),
        ModelMeasurements(load("random:emad-nano"), Study(), RunResources()),
        int8_context(),
    ).verdict
    assert verdict.verdict == "not applicable"
    assert "random weights" in verdict.reason


def test_without_an_int8_copy_it_is_unmeasured(nano: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    def no_kernel(loaded: LoadedModel) -> LoadedModel:
        raise BadArgument("model", loaded.name, "blocks made of nn.Linear")

    monkeypatch.setattr(identities, "int8_copy", no_kernel)
    verdict = answer_question(
        find_question_of_claim("EMAD-E12"),
        ModelMeasurements(nano, Study(corpus="self"), RunResources()),
        int8_context(),
    ).verdict
    assert verdict.verdict == "unmeasured"
    assert "blocks made of nn.Linear" in verdict.reason
