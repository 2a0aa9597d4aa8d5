"""All measurements of one model under one study, each made on first use."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from emad_ref.calibration.trace import EmptyCorpus
from emad_ref.measurements.early_exits import ITEM_ROWS, EarlyExitMeasurements
from emad_ref.measurements.engine import DOCUMENTS, EngineAnswers
from emad_ref.measurements.latency import LatencyBenchmark, extra_batch_sizes
from emad_ref.measurements.learned_exit import (
    ComponentExchange,
    ExitEvaluation,
    SelfSpeculationTiming,
    component_exchanges,
)
from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.measurements.operating_points import CandidatePoints
from emad_ref.measurements.pareto import BaselineComparison
from emad_ref.measurements.process_replicates import ProcessReplicates
from emad_ref.measurements.run_resources import ModelIsolation, RunResources, SubprocessRunner, copy_model
from emad_ref.measurements.stated_rule import OwnRuleEvidence, own_rule_evidence
from emad_ref.measurements.study import FEWEST, Study
from emad_ref.measurements.task_scores import TaskScores
from emad_ref.measurements.traces import EntropyEstimates, LensTraces
from emad_ref.measurements.verification import FlopVerification, ReplayValidity
from emad_ref.models.loading import LoadedModel, load
from emad_ref.text.documents import Split

JUDGED_SPLITS: tuple[Split, ...] = ("calibrate", "validate", "evaluate")
SHIFTED_CORPORA = {"world:premise": "world:mixed", "world:mixed": "world:premise"}  # the two that differ most


class ModelMeasurements:
    """Measurements of ``subject``: the model, its text, decoders and oracle; each is made on first use."""

    def __init__(
        self, loaded: LoadedModel, study: Study, resources: RunResources, isolation: ModelIsolation | None = None
    ):
        self.loaded, self.study, self.resources = loaded, study, resources
        self.subject = ModelUnderTest(loaded, study, resources, isolation)

    def check(self) -> None:
        """Check what every claim needs before the first is decided, so that a failure is reported once.

        Raises:
            EmadError: layers that compute other logits than the model, a family without a tolerance, a split without
            text, a
                profile or an exit that cannot be read or belongs to another model, a margin under which no token exits.
        """
        assert self.subject.tolerance > 0  # builds the stepper, which compares its logits with the model's
        for split in JUDGED_SPLITS:
            if not self.subject.sequences(split, 1):
                raise EmptyCorpus(
                    f"corpus={self.corpus!r} has no document of two tokens for split {split!r}, but expected at least "
                    "one for each of calibrate, validate and evaluate; use a larger corpus"
                )
        if self.study.profile is not None or self.study.margin is not None:
            self.traces.profile.point(self.study.margin or 0.0)
        if self.study.exit is not None:
            assert self.learned_exit.exit  # reads the file and compares its fingerprint
        self.scored.published.check()

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def corpus(self) -> str:
        return self.subject.corpus

    @property
    def fingerprint(self) -> str:
        return self.subject.fingerprint

    @property
    def most_rows(self) -> int:
        """The most rows per request that a verdict on this model reads."""
        sizes = [*self.study.budget.batch_sizes, *extra_batch_sizes(self.study.budget), self.scored.rows]
        return max(*sizes, ITEM_ROWS if self.subject.seq2seq else 1)

    @cached_property
    def engine(self) -> EngineAnswers:
        return EngineAnswers(self.subject, max(DOCUMENTS, self.study.budget.evaluate))

    @cached_property
    def own_rule(self) -> OwnRuleEvidence:
        return own_rule_evidence(self.subject)

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
    def scored(self) -> TaskScores:
        return TaskScores(self.subject)

    @cached_property
    def points(self) -> CandidatePoints:
        return CandidatePoints(self.traces, self.scored, self.flop_verification)

    @cached_property
    def estimates(self) -> EntropyEstimates:
        return EntropyEstimates(self.traces)

    @cached_property
    def rivals(self) -> BaselineComparison:
        return BaselineComparison(self.traces)

    @cached_property
    def latency(self) -> LatencyBenchmark:
        replicates = ProcessReplicates(self.resources.runner, self.subject)
        return LatencyBenchmark(self.points, None if replicates.without else replicates.divide, replicates.without)

    @cached_property
    def learned_exit(self) -> ExitEvaluation:
        return ExitEvaluation(self.traces, self.replay_validity)

    @cached_property
    def self_speculation(self) -> SelfSpeculationTiming:
        return SelfSpeculationTiming(self.learned_exit, self.latency)

    @cached_property
    def component_exchanges(self) -> list[ComponentExchange]:
        return list(component_exchanges(self.learned_exit, self.traces))

    @cached_property
    def exits(self) -> EarlyExitMeasurements:
        return EarlyExitMeasurements(self.subject, lambda name: self.beside(name).exits)

    # ------------------------------------------------------------ other models and corpora

    def of(self, loaded: LoadedModel) -> ModelMeasurements:
        """Measurements of a model made in memory (a copy of this one) under the same study.

        No other process can load it.
        """
        resources = replace(self.resources, runner=SubprocessRunner(without="the model was made in this process"))
        return ModelMeasurements(loaded, self.study, resources, ModelIsolation(loaded, copy_model))

    @cached_property
    def shifted(self) -> ModelMeasurements | None:
        """Measurements of the same model on another corpus, whose profile is foreign here; None without one."""
        other = SHIFTED_CORPORA.get(self.corpus, None if self.corpus == "self" else "self")
        if other is None or not self.loaded.trained:
            return None
        study = replace(self.study, corpus=other, profile=None)
        if other == "self" and self.subject.budget != self.study.budget:
            # a large model writes no more text than calibrates: a token of it takes a step of decoding
            fewest = min(FEWEST["calibrate"], self.study.budget.calibrate)
            study = replace(study, budget=replace(self.study.budget, calibrate=fewest))
        return ModelMeasurements(self.loaded, study, self.resources, self.subject.isolation)

    def beside(self, name: str) -> ModelMeasurements:
        """Measurements of another model under the same study."""
        study = self.study
        loaded = load(name, device=study.device, dtype=self.subject.stepper.dtype, seed=study.seed, backend=study.walk)
        return ModelMeasurements(loaded, self.study, self.resources)
