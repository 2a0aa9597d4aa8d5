"""EMAD-E4, E7 and E9 on a small model: the resampled units, and the effect of a failed bridge."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.models.causal import CausalStepper
from emad_ref.models.stepper import Stepper
from emad_ref.protocol import Unsupported
from pytest_emad.claims import ablations, entropy_premises, speedup
from pytest_emad.claims.base import Answer, RunPlan, absent_for_decoder, answer_question, find_question_of_claim
from pytest_emad.claims.entropy_premises import EstimatorRankCorrelationEvidence
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.traces import EntropyEstimators
from pytest_emad.statistics.units import ByPair, DocumentMembership
from pytest_emad.statistics.verdicts import load_register
from tests.claims.simulation import asked
from tests.small_measurements import DOCUMENTS, PROBES, refuted, small_evidence
from tests.small_models import LAYERS, small_model

PAIRS = 30
BESIDE = ("state copying", "monotone", "blocks left out")
NOT_PREDICTED = "replay does not predict this decoder: depth 3, not 2"
REPLAYED = (
    "EMAD-E4",
    "EMAD-E6",
    "EMAD-E9",
    "EMAD-E10",
    "EMAD-E11",
    "EMAD-R1",
    "EMAD-R2",
    "EMAD-R3",
    "EMAD-R4",
    "EMAD-X7",
)


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture(scope="module")
def sound(stepper: Stepper) -> ModelMeasurements:
    """Return measurements whose bridge passes: the reference decoder."""
    return small_evidence(stepper)


def answered(claim: str, evidence: ModelMeasurements) -> Answer:
    docket = RunPlan(load_register(), evidence.study)
    return answer_question(find_question_of_claim(claim), evidence, docket.make_context(claim, evidence.name, LAYERS))


# ---------------------------------------------------------------- the unit of EMAD-E4


def test_windows_of_one_document_are_no_documents_of_their_own() -> None:
    """Forty windows of twenty documents: as forty documents they would falsify, as twenty they are too few."""
    rng = np.random.default_rng(0)
    full = rng.standard_normal((40 * 10, 1))
    readings = {"topk": full + rng.standard_normal(full.shape)}
    window = np.repeat(np.arange(40), 10)
    as_windows = entropy_premises.decide_estimator_rank_correlation(
        EstimatorRankCorrelationEvidence([2], full, readings, DocumentMembership(window)), asked("EMAD-E4", rng)
    )
    as_documents = entropy_premises.decide_estimator_rank_correlation(
        EstimatorRankCorrelationEvidence([2], full, readings, DocumentMembership(window // 2)), asked("EMAD-E4", rng)
    )
    assert (as_windows.verdict, as_windows.n) == ("falsified", 40)
    assert (as_documents.verdict, as_documents.n) == ("inconclusive", 20)
    assert as_documents.estimate == as_windows.estimate


def test_estimators_are_resampled_by_document(sound: ModelMeasurements) -> None:
    """The text has two windows of every second document."""
    verdict = answered("EMAD-E4", sound).verdict
    windows = sound.subject.cut_windows("evaluate", entropy_premises.READ)
    assert len(windows) > DOCUMENTS
    assert {leg.n for leg in verdict.legs} == {DOCUMENTS}


@pytest.mark.parametrize(
    ("vocabulary", "width", "names"),
    [
        (50304, 512, ["topk-32", "topk-128", "lowrank-32 top-128", "lowrank-64 top-128"]),
        (512, 128, ["topk-8", "topk-32", "lowrank-8 top-32", "lowrank-16 top-32"]),
        (101, 32, ["topk-4", "topk-6", "lowrank-2 top-6", "lowrank-4 top-6"]),
        (64, 8, ["topk-4", "lowrank-1 top-4"]),
    ],
)
def test_estimators_have_the_sizes_the_paper_means(vocabulary: int, width: int, names: list[str]) -> None:
    """K is 32 and 128, but at most V/64 and V/16; ranks are d/16 and d/8."""
    subject = SimpleNamespace(stepper=SimpleNamespace(unembedding=np.zeros((vocabulary, width))))
    paper = EntropyEstimators(SimpleNamespace(subject=subject)).paper_topk_and_lowrank_estimators
    assert [estimator.name for estimator in paper] == names


# ---------------------------------------------------------------- a bridge that failed


@pytest.mark.parametrize("claim", REPLAYED)
def test_what_replay_decides_does_not_apply_behind_a_bridge_that_failed(stepper: Stepper, claim: str) -> None:
    verdict = answered(claim, refuted(small_evidence(stepper))).verdict
    assert (verdict.verdict, verdict.reason) == ("not applicable", NOT_PREDICTED)


def test_uncertainty_is_judged_where_the_bridge_holds(sound: ModelMeasurements) -> None:
    answer = answered("EMAD-E9", sound)
    assert answer.verdict.verdict != "not applicable"
    assert all(20 <= leg.n <= DOCUMENTS for leg in answer.verdict.legs)  # effective number: some are longer than others
    assert [table.figure for table in answer.attachments.tables] == ["depth by position"]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated clock: exact repairs take twice as long as full depth, copies half as long."""
    factors = {"full": 1.0, "eager backfill": 2.0, "deferred fill": 2.0, "state copying": 0.5, "monotone": 0.6}

    class Known:
        def __init__(self, points: Any, *divided: Any):
            self.most_saving_point = points.traces.profile.point(0.0)

        def time_against_full_depth(self, points: Any, *, decides: bool) -> Any:
            assert decides
            noise = np.random.default_rng(0).uniform(0.99, 1.01, (len(factors), PAIRS))
            seconds = {name: factors[name] * noise[i] for i, name in enumerate(["full", *points])}
            columns = {name: ByPair(column) for name, column in seconds.items()}
            return SimpleNamespace(paired_seconds_by_arm=lambda: columns, compute_skipped_share=lambda arm, layers: 0.4)

        def describe_timing(self, what: str, races: Any) -> str:
            return f"timed {what}"

    monkeypatch.setattr("pytest_emad.measurements.model_measurements.LatencyBenchmark", Known)


@pytest.mark.usefixtures("timed")
def test_times_stand_behind_a_bridge_that_failed_without_flops_and_copied_quality(stepper: Stepper) -> None:
    whole, bare = answered("EMAD-E7", small_evidence(stepper)), answered("EMAD-E7", refuted(small_evidence(stepper)))
    named = {leg.name: leg for leg in whole.verdict.legs}
    assert set(named) == {
        *speedup.EXACT, *BESIDE, *(f"{name}: FLOPs" for name in speedup.EXACT), "state copying: perplexity",
    }  # fmt: skip
    assert named["state copying: perplexity"].n in range(speedup.DECODED - 6, speedup.DECODED)  # effective number
    assert whole.attachments.notes == ("timed repairs",)
    assert [leg.name for leg in bare.verdict.legs] == [*speedup.EXACT, *BESIDE]
    assert all(leg == named[leg.name] for leg in bare.verdict.legs)
    assert bare.verdict.verdict == "survived"
    assert bare.attachments.notes == (
        "timed repairs",
        f"small: EMAD-E7: no FLOPs and no quality: {NOT_PREDICTED}",
    )


@pytest.mark.usefixtures("timed")
def test_random_weights_are_timed_without_a_word_about_quality(stepper: Stepper) -> None:
    evidence = small_evidence(stepper)
    evidence.loaded.trained = False
    evidence.replay_validity.bridge_finding = None  # reading it would be an error
    answer = answered("EMAD-E7", evidence)
    assert [leg.name for leg in answer.verdict.legs] == [*speedup.EXACT, *BESIDE]
    assert answer.attachments.notes == ("timed repairs",)


def test_a_decoder_that_declines_a_schedule_is_not_judged_by_its_time(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = small_evidence(stepper)

    def declines(points: Any, *, decides: bool) -> Any:
        raise Unsupported("monotone depth only")

    monkeypatch.setattr(evidence.latency, "time_against_full_depth", declines)
    verdict = answered("EMAD-E7", evidence).verdict
    assert (verdict.verdict, verdict.reason) == ("not applicable", "monotone depth only")


def test_quality_that_the_decoder_leaves_open_is_refused_by_it(stepper: Stepper) -> None:
    evidence = refuted(small_evidence(stepper))
    found = answered("EMAD-F1", evidence)
    assert (found.verdict.verdict, found.refused.reason) == ("not applicable", NOT_PREDICTED)
    assert absent_for_decoder(small_evidence(stepper)) is None
    evidence.loaded.trained = False
    assert absent_for_decoder(evidence) is None, "the quality of random weights cannot be decided"


def test_without_a_saving_of_its_own_no_foreign_profile_is_calibrated(stepper: Stepper) -> None:
    """A model that generates its own foreign text takes minutes for it."""
    evidence = small_evidence(stepper)
    never = replace(evidence.traces.calibrate_profile(PROBES), targets_nats=(0.0,) * len(PROBES))
    evidence.traces.calibrate_profile = lambda *args, **options: never
    evidence.on_shifted_corpus = SimpleNamespace(corpus="another")  # without traces
    verdict = answered("EMAD-E6", evidence).verdict
    assert (verdict.verdict, verdict.reason) == ("not applicable", ablations.NO_SAVING)
