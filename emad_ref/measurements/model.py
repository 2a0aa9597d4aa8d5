"""All measurements of one model under one study, each made when first used."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from emad_ref.calibration.trace import EmptyCorpus
from emad_ref.measurements.early_exits import ITEM_ROWS, EarlyExitMeasurements
from emad_ref.measurements.latency import BatchSizeSweep, LatencyBenchmark, extra_batch_sizes
from emad_ref.measurements.learned_exit import ComponentAblation, ExitEvaluation, SelfSpeculationTiming
from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.measurements.operating_points import CandidatePoints
from emad_ref.measurements.pareto import BaselineComparison
from emad_ref.measurements.process_replicates import ProcessReplicates
from emad_ref.measurements.run_resources import ModelIsolation, RunResources, SubprocessRunner, copy_model
from emad_ref.measurements.study import Study
from emad_ref.measurements.task_scores import TaskScores
from emad_ref.measurements.traces import EntropyEstimates, LensTraces
from emad_ref.measurements.verification import FlopVerification, ReplayValidity
from emad_ref.models.loading import LoadedModel, load
from emad_ref.text.documents import Split

JUDGED_SPLITS: tuple[Split, ...] = ("calibrate", "validate", "evaluate")
SHIFTED_CORPORA = {"world:premise": "world:mixed", "world:mixed": "world:premise"}  # corpora at hand that differ most


class ModelMeasurements:
    """``subject``: model, text, decoders, oracles. The other members are derived from it, by kind of question."""

    def __init__(self, loaded: LoadedModel, study: Study, host: RunResources, lending: ModelIsolation | None = None):
        self.loaded, self.study, self.host = loaded, study, host
        self.subject = ModelUnderTest(loaded, study, host, lending)

    def check(self) -> None:
        """What every question needs, tried before the first is asked, so that its absence is said once.

        Raises:
            EmadError: layers that do not walk as the model does, a family without a tolerance, a split without text,
                a profile or an exit that cannot be read or belongs to another model, a margin under which nothing
                exits.
        """
        assert self.subject.tolerance > 0  # asks for the stepper, which walks the model once and compares
        for split in JUDGED_SPLITS:
            if not self.subject.sequences(split, 1):
                raise EmptyCorpus(
                    f"corpus={self.corpus!r} has no document of two tokens for split {split!r}, but expected at least "
                    "one for each of calibrate, validate and evaluate; use a larger corpus"
                )
        if self.study.profile is not None or self.study.margin is not None:
            self.traces.profile.point(self.study.margin or 0.0)
        if self.study.exit is not None:
            assert self.beyond.exit  # read, and held against this model
        self.scored.published.check()

    # ------------------------------------------------------------ what reports say of it

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
        """The most rows that a verdict on this model reads from one request."""
        sizes = [*self.study.budget.batch_sizes, *extra_batch_sizes(self.study.budget), self.scored.rows]
        return max(*sizes, ITEM_ROWS if self.subject.seq2seq else 1)

    # ------------------------------------------------------------ holders

    @cached_property
    def bridging(self) -> ReplayValidity:
        """Whether replay speaks for the decoder under test, and points that probe it."""
        return ReplayValidity(self.subject)

    @cached_property
    def witnessed(self) -> FlopVerification:
        """Whether the work that the decoder under test counts is what it executes."""
        return FlopVerification(self.bridging)

    @cached_property
    def traces(self) -> LensTraces:
        """Lens traces of three splits, and the profile."""
        return LensTraces(self.subject)

    @cached_property
    def scored(self) -> TaskScores:
        """What this model answers on the tasks of its corpus, and on lm-eval's."""
        return TaskScores(self.subject)

    @cached_property
    def points(self) -> CandidatePoints:
        """The operating points put forward, and what they lose and save."""
        return CandidatePoints(self.traces, self.scored, self.witnessed)

    @cached_property
    def estimates(self) -> EntropyEstimates:
        """Cheaper readings of entropy than a full softmax."""
        return EntropyEstimates(self.traces)

    @cached_property
    def rivals(self) -> BaselineComparison:
        """EMAD beside fixed truncation, fixed thresholds and other schedules."""
        return BaselineComparison(self.traces)

    @cached_property
    def stopwatch(self) -> LatencyBenchmark:
        """What the decoder under test takes in time."""
        fresh = ProcessReplicates(self.host.afresh, self.subject)
        return LatencyBenchmark(self.points, None if fresh.without else fresh.races, fresh.without)

    @cached_property
    def swept(self) -> BatchSizeSweep:
        """The same at batch sizes that decide nothing."""
        return BatchSizeSweep(self.stopwatch, self.study.budget)

    @cached_property
    def beyond(self) -> ExitEvaluation:
        """What would work on this model instead: an exit, ceilings, and what of EMAD fails."""
        return ExitEvaluation(self.traces, self.bridging)

    @cached_property
    def drafted(self) -> SelfSpeculationTiming:
        """What drafting for itself takes in time."""
        return SelfSpeculationTiming(self.beyond, self.stopwatch)

    @cached_property
    def exchanged(self) -> ComponentAblation:
        """EMAD as published beside itself with one part exchanged."""
        return ComponentAblation(self.beyond, self.traces)

    @cached_property
    def exits(self) -> EarlyExitMeasurements:
        """What this encoder-decoder answers under early-exit rules, and what that cost."""
        return EarlyExitMeasurements(self.subject, lambda name: self.beside(name).exits)

    # ------------------------------------------------------------ other models and corpora

    def of(self, loaded: LoadedModel) -> ModelMeasurements:
        """Evidence about a model made in memory (a copy of this one) under the same study, from the same host.

        No name leads another process to it.
        """
        host = replace(self.host, afresh=SubprocessRunner(without="the model was made in this process"))
        return ModelMeasurements(loaded, self.study, host, ModelIsolation(loaded, copy_model))

    @cached_property
    def shifted(self) -> ModelMeasurements | None:
        """The same model on another corpus, whose profile is foreign here; None where there is no other."""
        other = SHIFTED_CORPORA.get(self.corpus, None if self.corpus == "self" else "self")
        if other is None or not self.loaded.trained:
            return None
        return ModelMeasurements(
            self.loaded, replace(self.study, corpus=other, profile=None), self.host, self.subject.lending
        )

    def beside(self, name: str) -> ModelMeasurements:
        """Evidence of another model under the same study."""
        study = self.study
        loaded = load(name, device=study.device, dtype=self.subject.stepper.dtype, seed=study.seed, backend=study.walk)
        return ModelMeasurements(loaded, self.study, self.host)
