"""EMAD-E12: windows of one document are one document, and a forced depth is held against the copy's own."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.calibration.trace import TokenSequence, concatenate_traces, trace_stepwise
from emad_ref.claims import emad_e12
from emad_ref.claims.base import ClaimContext, ask, question_of
from emad_ref.claims.emad_e12 import (
    FED,
    QuantisationEvidence,
    QuantisedRise,
    decide,
    invariant_differences,
    rise_of,
)
from emad_ref.errors import BadArgument
from emad_ref.exit_rules.rules import fixed_entropy_point
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.run_resources import RunResources
from emad_ref.measurements.study import Study
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.quantisation import int8_copy
from emad_ref.mutants.base import DECLARED_NOISE
from emad_ref.mutants.catalogue import CATALOGUE
from emad_ref.point import full_depth
from emad_ref.protocol import Unsupported
from emad_ref.statistics.units import ByDocument, DocumentOf
from emad_ref.statistics.verdicts import Leg, load_register
from emad_ref.sweep.losses import loss_table

CLAIM = load_register()["EMAD-E12"]


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


def asked() -> ClaimContext:
    return ClaimContext(CLAIM, "m", np.random.default_rng(5))


def perplexity_leg(document: DocumentOf, rates: np.ndarray, tokens: np.ndarray) -> Leg:
    """Of windows whose NLL rises by ``rates`` nats per token, cut from the documents of these numbers."""
    columns = (rates * tokens, np.zeros(len(rates)), tokens)
    rise = QuantisedRise("p", 0.5, *(ByDocument.summed(column, document) for column in columns))
    return decide(QuantisationEvidence(np.zeros(FED), 1e-4, rise), asked()).legs[-1]


def test_windows_of_one_document_are_not_resampled_on_their_own():
    """Two hundred documents, four alike windows of each: as 800 documents the row would survive, as 200 it is open."""
    source = np.random.default_rng(1)
    of_each = source.normal(0.0, 0.06, 200)
    rates, tokens = np.repeat(of_each - of_each.mean() + 0.004, 4), np.full(800, 100)
    of_documents = perplexity_leg(DocumentOf(np.repeat(np.arange(200), 4)), rates, tokens)
    as_if_independent = perplexity_leg(DocumentOf(np.arange(800)), rates, tokens)
    assert (of_documents.n, as_if_independent.n) == (200, 800)
    assert of_documents.estimate == pytest.approx(as_if_independent.estimate)
    assert (of_documents.outcome, as_if_independent.outcome) == ("inconclusive", "survived")


def test_losses_of_windows_are_summed_within_the_documents_they_were_cut_from(nano: LoadedModel):
    """Three windows of two documents on a real copy: sums over all tokens stay, entries are documents."""
    int8, source = int8_copy(nano), np.random.default_rng(3)
    cut = [(9, 0), (5, 0), (7, 1)]
    texts = [
        TokenSequence(source.integers(0, nano.stepper.vocabulary, length), document=number) for length, number in cut
    ]
    trace = concatenate_traces([trace_stepwise(int8.stepper, text) for text in texts])
    loss, full = loss_table(trace, int8.geometry, [fixed_entropy_point(4, (1,), 1e9), full_depth(4)])
    rise = rise_of(texts, trace, loss, full)
    assert rise.tokens.values.tolist() == [8 + 4, 6]
    assert rise.nll_nats.values.tolist() == [loss.nll_nats[0] + loss.nll_nats[1], loss.nll_nats[2]]
    assert rise.full_nll_nats.values.sum() == pytest.approx(full.nll_nats.sum())
    assert rise.net_reduction == loss.net_reduction > 0.15


def test_forced_depths_are_held_against_the_copys_own_readouts(nano: LoadedModel):
    evidence = ModelMeasurements(nano, Study(corpus="self"), RunResources())
    differences, allowed = invariant_differences(evidence, int8_copy(nano))
    assert differences.shape == (FED,)
    assert 0 <= differences.max() <= allowed == evidence.subject.tolerance
    against_the_original, _ = invariant_differences(evidence, nano)
    assert against_the_original.max() <= evidence.subject.tolerance


def test_declared_noise_is_allowed_for(nano: LoadedModel):
    noisy = CATALOGUE["honest-noise"].make
    evidence = ModelMeasurements(nano, Study(corpus="self"), RunResources(make_decoder=noisy))
    differences, allowed = invariant_differences(evidence, nano)
    assert evidence.subject.tolerance < differences.max() <= allowed == DECLARED_NOISE


def test_a_decoder_that_declines_is_heard(nano: LoadedModel):
    def declines(request: object) -> None:
        raise Unsupported("no depth from outside")

    evidence = ModelMeasurements(nano, Study(corpus="self"), RunResources(make_decoder=declines))
    with pytest.raises(Unsupported, match="no depth from outside"):
        invariant_differences(evidence, int8_copy(nano))


def test_random_weights_have_no_quality_to_keep():
    verdict = ask(
        question_of("EMAD-E12"), ModelMeasurements(load("random:emad-nano"), Study(), RunResources()), asked()
    ).verdict
    assert verdict.verdict == "not applicable"
    assert "random weights" in verdict.reason


def test_without_an_int8_copy_it_is_unmeasured(nano: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    def no_kernel(loaded: LoadedModel) -> LoadedModel:
        raise BadArgument("model", loaded.name, "blocks made of nn.Linear")

    monkeypatch.setattr(emad_e12, "int8_copy", no_kernel)
    verdict = ask(
        question_of("EMAD-E12"), ModelMeasurements(nano, Study(corpus="self"), RunResources()), asked()
    ).verdict
    assert verdict.verdict == "unmeasured"
    assert "blocks made of nn.Linear" in verdict.reason
