"""All measurements of one model under one study, each made on first use."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from emad_ref.absent import Absent
from emad_ref.calibration.trace import EmptyCorpus
from emad_ref.models.loading import LoadedModel, load
from emad_ref.text.documents import Split
from pytest_emad.measurements.early_exits import EarlyExitMeasurements
from pytest_emad.measurements.engine import DOCUMENTS, EngineAnswers
from pytest_emad.measurements.latency import LatencyBenchmark
from pytest_emad.measurements.learned_exit import (
    ComponentExchange,
    ExitEvaluation,
    SelfSpeculationTiming,
    iterate_method_component_exchanges,
)
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.measurements.operating_points import CandidatePoints
from pytest_emad.measurements.pareto import BaselineComparison
from pytest_emad.measurements.process_replicates import ProcessReplicates
from pytest_emad.measurements.replay_and_flop_checks import FlopVerification, ReplayValidity
from pytest_emad.measurements.run_resources import ModelIsolation, RunResources, SubprocessRunner, copy_model
from pytest_emad.measurements.stated_rule import OwnRuleSpeedupEvidence, measure_own_rule_speedup
from pytest_emad.measurements.study import FEWEST, Study
from pytest_emad.measurements.task_scores import TaskScores
from pytest_emad.measurements.traces import EntropyEstimators, LensTraces

JUDGED_SPLITS: tuple[Split, ...] = ("calibrate", "validate", "evaluate")
SHIFTED_CORPORA = {"world:premise": "world:mixed", "world:mixed": "world:premise"}  # the two most different families


class ModelMeasurements:
    """Measurements of ``subject``: the model, its text, decoders and oracle; each is made on first use."""

    def __init__(
        self, loaded: LoadedModel, study: Study, resources: RunResources, isolation: ModelIsolation | None = None
    ):
        self.loaded, self.study, self.resources = loaded, study, resources
        self.subject = ModelUnderTest(loaded, study, resources, isolation)

    def require_prerequisites_of_all_claims(self) -> None:
        """Check what every claim needs before the first is decided, so that a failure is reported once.

        Raises:
            EmadError: layers that compute other logits than the model, a family without a tolerance, a split without
            text, a profile or an exit that cannot be read or belongs to another model, a margin without exits.
        """
        assert self.subject.tolerance > 0  # builds the stepper, which compares its logits with the model's
        for split in JUDGED_SPLITS:
            if not self.subject.cut_windows(split, 1):
                raise EmptyCorpus(
                    f"corpus={self.corpus!r} has no document of two tokens for split {split!r}, but expected at least "
                    "one for each of calibrate, validate and evaluate; use a larger corpus"
                )
        if self.study.profile is not None or self.study.margin is not None:
            self.traces.profile.point(self.study.margin or 0.0)
        if self.study.exit is not None:
            assert self.exit_evaluation.exit  # reads the file and compares its fingerprint
        self.task_scores.published.require_known_tasks()

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def corpus(self) -> str:
        return self.subject.corpus

    @property
    def fingerprint(self) -> str:
        return self.subject.fingerprint

    @cached_property
    def engine_answers(self) -> EngineAnswers:
        return EngineAnswers(self.subject, max(DOCUMENTS, self.study.budget.evaluate))

    @cached_property
    def own_rule_evidence(self) -> OwnRuleSpeedupEvidence:
        return measure_own_rule_speedup(self.subject)

    @cached_property
    def replay_validity(self) -> ReplayValidity:
        return ReplayValidity(self.subject)

    @cached_property
    def flop_verification(self) -> FlopVerification:
        return FlopVerification(self.replay_validity)

    @cached_property
    def traces(self) -> LensTraces:
        return LensTraces(self.subject)

    @cached_property
    def task_scores(self) -> TaskScores:
        return TaskScores(self.subject)

    @cached_property
    def points(self) -> CandidatePoints:
        return CandidatePoints(self.traces, self.task_scores, self.flop_verification)

    @cached_property
    def entropy_estimators(self) -> EntropyEstimators:
        return EntropyEstimators(self.traces)

    @cached_property
    def baseline_comparison(self) -> BaselineComparison:
        return BaselineComparison(self.traces)

    @cached_property
    def latency(self) -> LatencyBenchmark:
        replicates = ProcessReplicates(self.resources.runner, self.subject)
        divide = replicates.absent or replicates.time_batch_sizes_over_processes
        return LatencyBenchmark(self.points, divide)

    @cached_property
    def exit_evaluation(self) -> ExitEvaluation:
        return ExitEvaluation(self.traces, self.replay_validity)

    @cached_property
    def self_speculation(self) -> SelfSpeculationTiming:
        return SelfSpeculationTiming(self.exit_evaluation, self.latency)

    @cached_property
    def component_exchanges(self) -> list[ComponentExchange]:
        return list(iterate_method_component_exchanges(self.exit_evaluation, self.traces))

    @cached_property
    def early_exits(self) -> EarlyExitMeasurements:
        return EarlyExitMeasurements(self.subject, lambda name: self.for_other_model(name).early_exits)

    # ------------------------------------------------------------ other models and corpora

    def for_model_copy_in_memory(self, loaded: LoadedModel) -> ModelMeasurements:
        """Measurements of a model made in memory (a copy of this one) under the same study.

        No other process can load it.
        """
        resources = replace(self.resources, runner=SubprocessRunner(Absent("the model was made in this process")))
        return ModelMeasurements(loaded, self.study, resources, ModelIsolation(loaded, copy_model))

    @cached_property
    def on_shifted_corpus(self) -> ModelMeasurements | None:
        """Measurements of the same model on another corpus, whose profile is foreign here; None without one."""
        other = SHIFTED_CORPORA.get(self.corpus, None if self.corpus == "self" else "self")
        if other is None or not self.loaded.trained:
            return None
        study = replace(self.study, corpus=other, corpus_group=None, profile=None)
        if other == "self" and self.subject.budget != self.study.budget:
            # a large model writes only as much text as calibration needs: each token takes a decoding step
            fewest = min(FEWEST["calibrate"], self.study.budget.calibrate)
            study = replace(study, budget=replace(self.study.budget, calibrate=fewest))
        return ModelMeasurements(self.loaded, study, self.resources, self.subject.isolation)

    def for_other_model(self, name: str) -> ModelMeasurements:
        """Measurements of another model under the same study."""
        study = self.study
        loaded = load(name, device=study.device, dtype=self.subject.stepper.dtype, seed=study.seed, backend=study.walk)
        return ModelMeasurements(loaded, self.study, self.resources)
