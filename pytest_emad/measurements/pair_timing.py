"""Latency of a pair: paired requests at batch 1, with the FLOPs and acceptance of the same runs.

Transformers' own assisted generation and prompt lookup are timed too. Outputs are checked after the clock stops; a
decoder that fails the check has no reported time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.self_speculation import self_speculate
from emad_ref.decoding.speculation import SpeculationResult, speculate
from emad_ref.decoding.switching import LARGE, SwitchingRule, switch
from emad_ref.models.generation import (
    LOOKUP,
    absent_drafting,
    make_prompt_lookup_generate,
    make_transformers_generate,
)
from emad_ref.models.loading import LoadedModel
from emad_ref.models.model_spec import FingerprintMismatch
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import attach_collected_tensors, collect_attachments
from emad_ref.protocol import Capabilities, Decoder, Prompt
from emad_ref.record import Ints
from pytest_emad.audit.spot_checks import TimedRequestOutputs, check_timed_lengths, check_timed_requests
from pytest_emad.audit.token_comparison import check_same_tokens
from pytest_emad.benchmark.clock import WARM_UP, time_call
from pytest_emad.measurements.latency import (
    Arm,
    ArmOutput,
    RequestBatchesByPair,
    TimingResult,
    describe_timing_processes,
    get_decoding_record,
    time_arms,
)
from pytest_emad.measurements.model_under_test import open_model
from pytest_emad.measurements.pair_models import DRAFT_TOKENS, PairModels
from pytest_emad.measurements.pair_routing import RoutingRules
from pytest_emad.measurements.process_replicates import ProcessReplicates, SubprocessTask, join_timings, select_requests
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import PairNames, PairSampleSizes, Study
from pytest_emad.screening.drafts import ASSISTED

TRANSFORMERS_NAMES = (ASSISTED, LOOKUP)
LOSSLESS_ARMS = ("speculative", "self-speculative", *TRANSFORMERS_NAMES)  # arms that must emit the large model's tokens
TRIAL_TOKENS = 3  # new tokens of a trial: one of the prefill, a draft and the token after it
AUDITED_PAIRS = 4  # pairs whose records are checked after the clock

PairArm = Callable[[Prompt, int], ArmOutput]  # one prompt and a number of new tokens, no stop token
# arms open until the stack closes; pickled for other processes, so it must not be a lambda
ArmFactory = Callable[[PairModels, ExitStack], dict[str, PairArm]]


@dataclass(frozen=True)
class TransformersArms:
    """Transformers' assisted arms that run for a pair; ``absent``: other arm → why."""

    arms: Mapping[str, PairArm]
    absent: Mapping[str, Absent]


def try_transformers_arms(small: LoadedModel, large: LoadedModel, prompt: Prompt) -> TransformersArms:
    """Assisted generation and prompt lookup over the judge's own models, each tried on ``prompt``.

    They keep no record, so their FLOPs are not counted.
    """
    model, device = large.model, large.stepper.device
    drafting = {ASSISTED: (small.model, model), LOOKUP: (model,)}
    absent = {name: why for name, models in drafting.items() if (why := absent_drafting(*models))}
    arms = {
        ASSISTED: make_transformers_generate(model, device, assistant=small.model),
        LOOKUP: make_prompt_lookup_generate(model, device),
    }
    for name, arm in arms.items():
        if name in absent:
            continue
        try:
            arm(prompt, TRIAL_TOKENS)
        except (RuntimeError, ValueError) as refusal:  # a cache that cannot be cropped, a model without one
            absent[name] = Absent(f"{type(refusal).__name__}: {str(refusal).strip().partition(chr(10))[0]}")

    def one_row(arm: Callable[[Prompt, int], Ints]) -> PairArm:
        return lambda prompt, new: arm(prompt, new)[None]

    return TransformersArms({name: one_row(arm) for name, arm in arms.items() if name not in absent}, absent)


def make_switching_and_speculative_arms(
    models: PairModels, stack: ExitStack, *, rule: SwitchingRule
) -> dict[str, PairArm]:
    """``large``, ``speculative``, and ``EAD`` by ``rule``."""
    small, large = stack.enter_context(models.open_partners())
    return {
        "large": make_decoder_arm(large.decoder),
        "speculative": make_speculative_arm(small, large),
        "EAD": make_switching_arm(small, large, rule),
    }


def make_emad_and_speculative_arms(
    models: PairModels, stack: ExitStack, *, point: OperatingPoint
) -> dict[str, PairArm]:
    """``large``, its ``EMAD`` at ``point``, ``speculative``, and ``self-speculative``.

    The last drafts after the first of ``exit_layers`` and is absent without one.
    """
    small, large = stack.enter_context(models.open_partners())
    arms = {
        "large": make_decoder_arm(large.decoder),
        "EMAD": make_decoder_arm(stack.enter_context(models.large.subject.open_decoder(point))),
        "speculative": make_speculative_arm(small, large),
    }
    if exit_layers := models.drafting_exit_layers:
        arms["self-speculative"] = make_self_speculative_arm(
            stack.enter_context(models.open_self_drafter()), exit_layers[0]
        )
    return arms


def make_decoder_arm(decoder: Decoder) -> PairArm:
    return lambda prompt, new: decoder.generate([prompt], new, frozenset())


def make_switching_arm(small: Partner, large: Partner, rule: SwitchingRule) -> PairArm:
    return lambda prompt, new: switch(small, large, rule, [prompt], new)


def make_speculative_arm(
    draft: Partner, verifier: Partner, k: int = DRAFT_TOKENS, gate_bits: float | None = None
) -> PairArm:
    return lambda prompt, new: speculate(draft, verifier, [prompt], new, k=k, gate_bits=gate_bits)


def make_self_speculative_arm(model: Partner, exit_layer: int) -> PairArm:
    return lambda prompt, new: self_speculate(model, exit_layer, [prompt], new, k=DRAFT_TOKENS)


def time_pair_arms(
    models: PairModels, arms: Mapping[str, PairArm], requests: RequestBatchesByPair, new: int
) -> TimingResult:
    """Time every arm on all ``requests``, of one row and ``new`` tokens each, in this process."""

    def of_one(arm: PairArm) -> Arm:
        return lambda prompts: arm(prompts[0], new)

    large = models.large.subject
    with large.open_decoder(large.full_depth_point) as decoder:
        return time_arms({name: of_one(arm) for name, arm in arms.items()}, requests, decoder.synchronize)


def compute_acceptance_rate_per_output(timed: TimingResult, arm: str) -> list[float]:
    """Accepted over judged drafts, of each output of ``arm`` that was drafted."""
    drafted = [output for output in timed.audited_decodings(arm) if isinstance(output, SpeculationResult)]
    return [output.acceptance_rate for output in drafted if output.acceptance_rate is not None]


def time_pair_as_subprocess_task(
    resources: RunResources,
    *,
    names: tuple[str, str],
    fingerprint: str,
    study: Study,
    size: PairSampleSizes,
    factory: ArmFactory,
    attached: Sequence[Mapping[str, Mapping[str, Any]]],
    requests: RequestBatchesByPair,
    new: int,
) -> TimingResult:
    """Time the pairs of one process, of the models ``names`` under ``study``, with transformers' own arms.

    ``attached``: of the small and of the large model, lenses and translators that points name by digest.

    Raises:
        FingerprintMismatch: a model has changed since the run began.
        Unsupported, BadArgument, DecoderFailed: as the decoder under test raises them.
    """
    with ExitStack() as stack:
        small, large = (stack.enter_context(open_model(name, study)) for name in names)
        models = PairModels(small, large, study, resources, size)
        if models.fingerprint != fingerprint:
            both = " + ".join(names)
            raise FingerprintMismatch(f"{both} are not the models any more with which the run began")
        for measured, own in zip(models.both, attached, strict=True):
            attach_collected_tensors(measured.subject.stepper, own)
        others = try_transformers_arms(small, large, requests.batches[0][0]).arms
        return time_pair_arms(models, {**factory(models, stack), **others}, requests, new)


class PairLatencyBenchmark:
    """Requests of one task's judged items, timed on first use, of the models ``names`` under ``study``."""

    def __init__(self, rules: RoutingRules, names: PairNames, study: Study):
        self._rules, self._names, self._study = rules, names, study
        self._pairs, self._seed = study.budget.pairs, study.seed  # pairs of the deciding rows
        self._answers, self._models = rules.answers, rules.answers.models
        large = self._models.large
        self._replicates = ProcessReplicates(large.resources.runner, large.subject)

    @property
    def task_to_time(self) -> str:
        """The task most worth routing, else the first with written answers, else plain texts."""
        return self._rules.decodable_tasks[0]

    @cached_property
    def timed_switching_rule(self) -> SwitchingRule:
        """The rule of the arm ``EAD``: the proposed one, else the one nearest to the paper's first saving."""
        if self._rules.written_tasks_worth_routing:
            return self._rules.select_rule_for_paper_saving(self.task_to_time)
        return self._rules.find_rule_nearest_saving(self.task_to_time, self._rules.savings[0])

    @cached_property
    def n_new_tokens(self) -> int:
        """New tokens of a timed request: the mean length of the large model's answers."""
        return round(float(self._rules.answer_judged_items_alone(LARGE, self.task_to_time).emitted.mean()))

    @cached_property
    def emad_point(self) -> OperatingPoint:
        """EMAD of the large model at its calibrated default."""
        return self._models.large.traces.profile.point(0.0)

    def make_prompts(self, count: int) -> list[Prompt]:
        """Prompts of judged items of ``task_to_time``; they repeat if there are fewer."""
        prompts = self._answers.make_prompts(self.task_to_time, "evaluate", max(self._rules.size.judged, count))
        return [prompts[at % len(prompts)] for at in range(count)]

    @cached_property
    def transformers_arms(self) -> TransformersArms:
        small, large = (measured.loaded for measured in self._models.both)
        return try_transformers_arms(small, large, self.make_prompts(1)[0])

    # ------------------------------------------------------------ timings

    def time_arms(self, arms: Mapping[str, PairArm], pairs: int) -> TimingResult:
        """Time ``arms`` on the same fresh prompts in this process."""
        return self._of_one_length(time_pair_arms(self._models, arms, self._requests(pairs), self.n_new_tokens))

    @cached_property
    def switching_timings(self) -> TimingResult:
        """``large``, ``speculative``, ``EAD`` by ``timed_switching_rule``, and those of ``transformers_arms``.

        Raises:
            AuditRefutedError: speculation emitted other tokens than the large model, and no tie excuses it.
            SubprocessFailed: a fresh process ended without its times.
        """
        timed, large = (
            self._raced(partial(make_switching_and_speculative_arms, rule=self.timed_switching_rule)),
            self._models.large.subject,
        )
        with large.open_decoder(large.full_depth_point) as verifier:
            self.require_lossless(timed, verifier.capabilities)
        return timed

    def time_emad_arms(self, point: OperatingPoint) -> TimingResult:
        """Times of ``make_emad_and_speculative_arms`` and ``transformers_arms``.

        Raises:
            AuditRefutedError: as ``switching_timings``; or EMAD's tokens, depths or work do not match its record.
            SubprocessFailed: as ``switching_timings``.
        """
        timed = self._raced(partial(make_emad_and_speculative_arms, point=point))
        large = self._models.large.subject
        with large.open_decoder(large.full_depth_point) as verifier, large.open_decoder(point) as emad:
            self.require_lossless(timed, verifier.capabilities)
            self._require_claimed(timed, point, emad.capabilities)
        return timed

    def _requests(self, pairs: int) -> RequestBatchesByPair:
        batches = [[prompt] for prompt in self.make_prompts(pairs + WARM_UP)]
        return RequestBatchesByPair(batches, range(pairs), (self._seed,))

    def _raced(self, factory: ArmFactory) -> TimingResult:
        """Time the project's arms and transformers', in this process or divided over fresh ones."""
        with ExitStack() as stack:
            arms = {**factory(self._models, stack), **self.transformers_arms.arms}
            if self._replicates.absent:
                return self.time_arms(arms, self._pairs)
            request_s = self._seconds(arms)
        whole, models = self._requests(self._pairs), self._models
        timing = partial(
            time_pair_as_subprocess_task,
            names=(self._names.small, self._names.large),
            fingerprint=models.fingerprint,
            study=self._study,
            size=self._rules.size,
            factory=factory,
            attached=[collect_attachments(measured.subject.stepper) for measured in models.both],
            new=self.n_new_tokens,
        )

        def share(number: int, pairs: Ints) -> SubprocessTask:
            return partial(timing, requests=select_requests(whole, pairs, number))

        parts = self._replicates.run_request_shares_in_processes(
            self._pairs, share, lambda pairs: (WARM_UP + pairs) * request_s
        )
        return self._of_one_length(join_timings(parts))

    def _seconds(self, arms: Mapping[str, PairArm]) -> float:
        """Seconds of one request by each of ``arms``, after one warm-up request."""
        (prompt,) = self.make_prompts(1)

        def run() -> None:
            for arm in arms.values():
                arm(prompt, self.n_new_tokens)

        run()
        return time_call(run).seconds

    def describe_timing(self, timed: TimingResult) -> str:
        """One sentence about the timed arms, the requests, and the machine."""
        where = describe_timing_processes(timed.process, self._replicates.absent)
        return (
            f"{self._names.name}: timed {', '.join(timed.seconds)}, {self.n_new_tokens} new tokens after prompts of "
            f"{self.task_to_time}, {len(timed.prompts)} pairs {where}"
        )

    # ------------------------------------------------------------ checks after the clock

    def _of_one_length(self, timed: TimingResult) -> TimingResult:
        check_timed_lengths(timed.emitted_token_ids_by_arm(), 1, self.n_new_tokens).require()
        return timed

    def require_lossless(self, timed: TimingResult, verifier: Capabilities, alone: str = "large") -> None:
        """Check that every arm of ``LOSSLESS_ARMS`` emitted the tokens of arm ``alone`` in every pair.

        Ties within the noise that the large model's decoder declares are excused. Raises AuditRefutedError.
        """
        large, emitted = self._models.large.subject, timed.emitted_token_ids_by_arm()
        prompts, declared = [prompt for (prompt,) in timed.prompts], large.compute_allowed_difference(verifier)
        expected, *others = (
            [rows[0].tolist() for rows in emitted[name]] for name in (alone, *LOSSLESS_ARMS) if name in emitted
        )
        for tokens in others:
            check_same_tokens(
                large.reference_lens, large.tolerance, prompts, tokens, expected, declared=declared
            ).require()

    def _require_claimed(self, timed: TimingResult, point: OperatingPoint, capabilities: Capabilities) -> None:
        """Check EMAD's records of a random few pairs."""
        large, pairs = self._models.large.subject, len(timed.prompts)
        audited = np.random.default_rng([self._seed, pairs]).choice(pairs, min(pairs, AUDITED_PAIRS), False)
        records = timed.audited_decodings("EMAD")
        chosen = [
            TimedRequestOutputs(timed.prompts[pair], {"EMAD": get_decoding_record(records[pair])}, {})
            for pair in audited
        ]
        noise = {"EMAD": max(large.tolerance, capabilities.logit_noise)}
        check_timed_requests(
            chosen, {"EMAD": point}, self.n_new_tokens, large.reference_lens, noise, counted=capabilities.counted
        ).require()
