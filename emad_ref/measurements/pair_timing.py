"""Latency of a pair's ways to answer: paired requests at batch 1, with the FLOPs and acceptance of the same runs.

Transformers' own assisted generation and prompt lookup are timed beside them. Outputs are checked after the clock
stops; a decoder that fails the check has no reported time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from emad_ref.audit.answers import TimedRequest, timed_lengths, timed_requests
from emad_ref.audit.token_comparison import same_tokens
from emad_ref.benchmark.clock import time_pairs
from emad_ref.decoding.pair import Partner
from emad_ref.decoding.self_speculation import self_speculate
from emad_ref.decoding.speculation import SpeculationResult, speculate
from emad_ref.decoding.switching import LARGE, SwitchingRule, switch
from emad_ref.measurements.latency import process_description
from emad_ref.measurements.model_under_test import open_model
from emad_ref.measurements.pair_models import DRAFT_TOKENS, PairModels, PairResult, record_of
from emad_ref.measurements.pair_routing import RoutingRules
from emad_ref.measurements.process_replicates import ProcessReplicates, require_same_arms
from emad_ref.measurements.run_resources import RunResources
from emad_ref.measurements.study import PairNames, PairSizes, Study
from emad_ref.models.loading import LoadedModel
from emad_ref.models.model_spec import FingerprintMismatch
from emad_ref.point import OperatingPoint
from emad_ref.probes.lens import attach_copies, attachments
from emad_ref.protocol import Capabilities, Decoder, Prompt
from emad_ref.record import Ints
from emad_ref.screening.drafts import ASSISTED, LOOKUP, by_assistant, by_lookup
from emad_ref.statistics.units import ByPair

TRANSFORMERS_NAMES = (ASSISTED, LOOKUP)
TRIAL_TOKENS = 3  # new tokens of a trial: one of the prefill, and a draft with what follows it


@dataclass(frozen=True)
class TransformersArms:
    """Arms that run, each from a prompt and a number of new tokens to int64 [new]; ``absent``: why others do not."""

    arms: Mapping[str, Callable[[Prompt, int], Ints]]
    absent: Mapping[str, str]


def transformers_arms(small: LoadedModel, large: LoadedModel, prompt: Prompt) -> TransformersArms:
    """Those of ``TRANSFORMERS_NAMES`` that transformers runs for this pair, each tried on ``prompt``."""
    arms, absent = {ASSISTED: by_assistant(large, small), LOOKUP: by_lookup(large)}, {}
    for name, arm in arms.items():
        try:
            arm(prompt, TRIAL_TOKENS)
        except (RuntimeError, ValueError) as refusal:  # a cache that cannot be cut back, a model without one
            absent[name] = f"{type(refusal).__name__}: {str(refusal).strip().partition(chr(10))[0]}"
    return TransformersArms({name: arm for name, arm in arms.items() if name not in absent}, absent)


WARM_UP = 2  # pairs that are not counted

PairArmOutput = PairResult | Ints  # what an arm made of a request: tokens [new] where it keeps no record
PairArm = Callable[[Prompt, int], PairArmOutput]
# our own arms, open as long as the stack is; crosses by pickle, so no lambda
ArmFactory = Callable[[PairModels, ExitStack], dict[str, PairArm]]


@dataclass(frozen=True, eq=False)
class PairRequests:
    """Requests before they are timed: ``prompts`` [warm-up + pairs], ``new`` tokens each, ``seed`` of their order."""

    prompts: Sequence[Prompt]
    new: int
    seed: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PairTimings:
    """Arm → [pairs]: wall-clock ``seconds``, and the ``results`` of the very same runs.

    ``new``: tokens that every request emitted; ``prompts`` [pairs].
    """

    seconds: Mapping[str, ByPair]
    results: Mapping[str, list[PairArmOutput]]
    new: int
    prompts: Sequence[Prompt] = ()

    def recorded(self, arm: str) -> list[PairResult]:
        """Results of an arm that keeps records; none of one that keeps none."""
        return [done for done in self.results[arm] if not isinstance(done, np.ndarray)]

    def accepted(self, arm: str) -> list[float]:
        """Accepted over judged drafts, of each run that drafted."""
        rates = [done.acceptance for done in self.results[arm] if isinstance(done, SpeculationResult)]
        return [rate for rate in rates if rate is not None]


def time_arms(models: PairModels, arms: Mapping[str, PairArm], drawn: PairRequests) -> PairTimings:
    """Every arm on what is ``drawn``, in this process."""
    results: dict[str, list[PairArmOutput]] = {name: [] for name in arms}

    def timed_arm(name: str) -> Callable[[int], None]:
        return lambda pair: results[name].append(arms[name](drawn.prompts[pair], drawn.new))

    large = models.large.subject
    with large.open(large.full) as decoder:
        timings = time_pairs(
            {name: timed_arm(name) for name in arms},
            len(drawn.prompts) - WARM_UP,
            np.random.default_rng(drawn.seed),
            warm_up=WARM_UP,
            synchronize=decoder.synchronize,
        )
    seconds = {name: ByPair(column) for name, column in timings.seconds.items()}
    counted = {name: done[WARM_UP:] for name, done in results.items()}
    return PairTimings(seconds, counted, drawn.new, drawn.prompts[WARM_UP:])


def switching_arms(rule: SwitchingRule, models: PairModels, stack: ExitStack) -> dict[str, PairArm]:
    """``large``, ``speculative``, and ``EAD`` by ``rule``."""
    small, large = stack.enter_context(models.partners())
    return {
        "large": single_model_arm(large.decoder),
        "speculative": speculative_arm(small, large),
        "EAD": switching_arm(small, large, rule),
    }


def adaptive_arms(point: OperatingPoint, models: PairModels, stack: ExitStack) -> dict[str, PairArm]:
    """``large``, ``EMAD`` of it at ``point``, ``speculative``, and ``self-speculative`` after the first of
    ``exit_layers`` where there is one."""
    small, large = stack.enter_context(models.partners())
    emad = stack.enter_context(models.large.subject.open(point))
    arms: dict[str, PairArm] = {
        "large": single_model_arm(large.decoder),
        "EMAD": single_model_arm(emad),
        "speculative": speculative_arm(small, large),
    }
    if exit_layers := models.exit_layers:
        drafting = stack.enter_context(models.drafting())
        arms["self-speculative"] = self_speculative_arm(drafting, exit_layers[0])
    return arms


def emitted_tokens(done: PairArmOutput) -> Sequence[Ints]:
    """[rows] of new tokens: of one row where no record is kept."""
    return [done] if isinstance(done, np.ndarray) else record_of(done).emitted


def single_model_arm(decoder: Decoder) -> PairArm:
    return lambda prompt, new: decoder.generate([prompt], new, frozenset())


def switching_arm(small: Partner, large: Partner, rule: SwitchingRule) -> PairArm:
    return lambda prompt, new: switch(small, large, rule, [prompt], new)


def speculative_arm(
    draft: Partner, verifier: Partner, k: int = DRAFT_TOKENS, gate_bits: float | None = None
) -> PairArm:
    return lambda prompt, new: speculate(draft, verifier, [prompt], new, k=k, gate_bits=gate_bits)


def self_speculative_arm(model: Partner, exit_layer: int) -> PairArm:
    return lambda prompt, new: self_speculate(model, exit_layer, [prompt], new, k=DRAFT_TOKENS)


@dataclass(frozen=True, eq=False)
class PairTimingShare:
    """What one process times: the models ``names`` under ``study``, by ``arming`` and by transformers' own ways.

    ``attached``  of the small and of the large model, what points name by digest.
    """

    names: tuple[str, str]
    fingerprint: str
    study: Study
    size: PairSizes
    arming: ArmFactory
    attached: tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
    drawn: PairRequests

    def run(self, host: RunResources) -> PairTimings:
        """This share's pairs, timed.

        Raises:
            FingerprintMismatch: a model has changed since the run began.
            Unsupported, BadArgument, DecoderFailed: as the decoder under test raises them.
        """
        with ExitStack() as stack:
            small, large = (stack.enter_context(open_model(name, self.study)) for name in self.names)
            models = PairModels(small, large, self.study, host, self.size)
            if models.fingerprint != self.fingerprint:
                raise FingerprintMismatch(
                    f"{' + '.join(self.names)} are not the models any more with which the run began"
                )
            for evidence, attached in zip(models.both, self.attached, strict=True):
                attach_copies(evidence.subject.stepper, attached)
            others = transformers_arms(small, large, self.drawn.prompts[0]).arms
            return time_arms(models, {**self.arming(models, stack), **others}, self.drawn)


def select_pair_share(drawn: PairRequests, pairs: Ints, number: int) -> PairRequests:
    """``pairs`` of all that is drawn, behind the same warm-up, in an order of arms that ``number`` draws."""
    prompts = [*drawn.prompts[:WARM_UP], *(drawn.prompts[WARM_UP + pair] for pair in pairs)]
    return replace(drawn, prompts=prompts, seed=(*drawn.seed, number))


def join_pair_shares(parts: Sequence[PairTimings]) -> PairTimings:
    """All pairs, in the order of ``parts``, one of each process.

    Raises:
        SubprocessFailed: they timed different arms.
    """
    arms = require_same_arms([list(part.seconds) for part in parts])
    process = np.repeat(np.arange(len(parts)), [len(part.prompts) for part in parts])
    return PairTimings(
        {arm: ByPair(np.concatenate([part.seconds[arm].values for part in parts]), process) for arm in arms},
        {arm: list(chain.from_iterable(part.results[arm] for part in parts)) for arm in arms},
        parts[0].new,
        list(chain.from_iterable(part.prompts for part in parts)),
    )


AUDITED_PAIRS = 4  # pairs whose records are looked at after the clock
LOSSLESS_ARMS = ("speculative", "self-speculative", *TRANSFORMERS_NAMES)  # arms that promise the large model's tokens


class PairLatencyBenchmark:
    """Requests of one task's judged items, timed when first asked for, of the models ``names`` under ``study``."""

    def __init__(self, rules: RoutingRules, names: PairNames, study: Study):
        self._rules, self._names, self._study = rules, names, study
        self._pairs, self._seed = study.budget.pairs, study.seed  # pairs of rows that decide
        self._answers, self._models = rules.answers, rules.answers.models
        large = self._models.large
        self._fresh = ProcessReplicates(large.host.afresh, large.subject)

    @property
    def task(self) -> str:
        """What is timed: the task most worth routing, else the first whose answers are written, else plain texts."""
        return self._rules.writable[0]

    @cached_property
    def rule(self) -> SwitchingRule:
        """How EAD switches while it is timed: as put forward where there is something to route, else as comes nearest
        to the first of the paper's savings."""
        if self._rules.written:
            return self._rules.put_forward(self.task)
        return self._rules.nearest(self.task, self._rules.savings[0])

    @cached_property
    def new(self) -> int:
        """New tokens of a timed request, no stop token: as many as the large model's answers take on average."""
        return round(float(self._rules.judged_alone(LARGE, self.task).emitted.mean()))

    def prompts(self, count: int) -> list[Prompt]:
        """Prompts of judged items of ``task``; where a file has fewer, its own come round again."""
        prompts = self._answers.prompts(self.task, "evaluate", max(self._rules.size.judged, count))
        return [prompts[at % len(prompts)] for at in range(count)]

    @cached_property
    def library(self) -> TransformersArms:
        """Transformers' own ways to the large model's output, and why those are absent that do not run."""
        small, large = (evidence.loaded for evidence in self._models.both)
        (prompt,) = self.prompts(1)
        return transformers_arms(small, large, prompt)

    def _drawn(self, pairs: int) -> PairRequests:
        return PairRequests(self.prompts(pairs + WARM_UP), self.new, (self._seed,))

    def timed(self, arms: Mapping[str, PairArm], pairs: int) -> PairTimings:
        """``arms`` on the same fresh prompts, in this process; each takes a prompt and a number of new tokens, and
        stops at none."""
        return self._of_one_length(time_arms(self._models, arms, self._drawn(pairs)))

    def _of_one_length(self, timed: PairTimings) -> PairTimings:
        emitted = {name: [emitted_tokens(one) for one in done] for name, done in timed.results.items()}
        timed_lengths(emitted, 1, self.new).require()
        return timed

    def _raced(self, arming: ArmFactory) -> PairTimings:
        """What decides: our own arms and transformers', in this process or divided over fresh ones.

        Raises:
            Unsupported: a decoder under test declines what an arm asks.
            SubprocessFailed: a fresh process ended without its times.
        """
        with ExitStack() as stack:
            arms = {**arming(self._models, stack), **self.library.arms}
            if self._fresh.without:
                return self.timed(arms, self._pairs)
            request_s = self._seconds(arms)
        whole, models = self._drawn(self._pairs), self._models
        small, large = (attachments(evidence.subject.stepper) for evidence in models.both)

        def share(number: int, pairs: Ints) -> PairTimingShare:
            drawn = select_pair_share(whole, pairs, number)
            names = (self._names.small, self._names.large)
            return PairTimingShare(
                names, models.fingerprint, self._study, self._rules.size, arming, (small, large), drawn
            )

        parts = self._fresh.shared(self._pairs, share, lambda pairs: (WARM_UP + pairs) * request_s)
        return self._of_one_length(join_pair_shares(parts))

    def _seconds(self, arms: Mapping[str, PairArm]) -> float:
        """Of one request by each of ``arms``, after another that warms them up."""
        (prompt,) = self.prompts(1)
        for _ in range(2):
            start = time.perf_counter()
            for arm in arms.values():
                arm(prompt, self.new)
        return time.perf_counter() - start

    def told(self, timed: PairTimings) -> str:
        """One sentence: what was timed, on which requests, and where."""
        seconds = next(iter(timed.seconds.values()))
        return (
            f"{self._names.name}: timed {', '.join(timed.seconds)}, {timed.new} new tokens after prompts of "
            f"{self.task}, {len(seconds)} pairs {process_description(seconds.process, self._fresh.without)}"
        )

    @cached_property
    def rivals(self) -> PairTimings:
        """``large``, ``speculative``, ``EAD`` by ``rule``, and those of ``library``.

        Raises:
            AuditRefutedError: speculation that emitted other tokens than the large model, and no tie excuses it.
            SubprocessFailed: as ``ProcessReplicates.shared``.
        """
        timed, large = self._raced(partial(switching_arms, self.rule)), self._models.large.subject
        with large.open(large.full) as verifier:
            self.require_lossless(timed, verifier.capabilities)
        return timed

    def emad_rivals(self, point: OperatingPoint) -> PairTimings:
        """``large``, ``EMAD`` of it at ``point``, ``speculative``, and ``self-speculative`` after the first of
        ``exit_layers`` where there is one, and those of ``library``.

        Raises:
            AuditRefutedError: as ``rivals``; or EMAD's tokens, depths or work are not what its record says.
            SubprocessFailed: as ``rivals``.
        """
        timed, large = self._raced(partial(adaptive_arms, point)), self._models.large.subject
        with large.open(large.full) as verifier, large.open(point) as emad:
            self.require_lossless(timed, verifier.capabilities)
            self._require_claimed(timed, point, emad.capabilities)
        return timed

    def require_lossless(self, timed: PairTimings, verifier: Capabilities, alone: str = "large") -> None:
        """Every arm of ``LOSSLESS`` emitted what ``alone`` did, in every pair, up to ties within the noise that
        ``verifier``, capabilities of the large model's decoder, declare.

        Raises:
            AuditRefutedError: one that did not.
        """
        large = self._models.large.subject
        wanted, *others = (
            [emitted_tokens(one)[0].tolist() for one in timed.results[name]]
            for name in (alone, *LOSSLESS_ARMS)
            if name in timed.results
        )
        for found in others:
            declared = large.allowed(verifier)
            same_tokens(large.lens, large.tolerance, timed.prompts, found, wanted, declared=declared).require()

    def _require_claimed(self, timed: PairTimings, point: OperatingPoint, capabilities: Capabilities) -> None:
        """EMAD's records, of a random few pairs, are true."""
        large, pairs = self._models.large.subject, len(timed.prompts)
        looked_at = np.random.default_rng([self._seed, pairs]).choice(pairs, min(pairs, AUDITED_PAIRS), False)
        records = [record_of(timed.recorded("EMAD")[pair]) for pair in looked_at]
        chosen = [
            TimedRequest([timed.prompts[pair]], {"EMAD": record}, {})
            for pair, record in zip(looked_at, records, strict=True)
        ]
        noise = {"EMAD": max(large.tolerance, capabilities.logit_noise)}
        timed_requests(chosen, {"EMAD": point}, timed.new, large.lens, noise, counted=capabilities.counted).require()

    @cached_property
    def emad_point(self) -> OperatingPoint:
        """EMAD of the large model at its calibrated default."""
        return self._models.large.traces.profile.point(0.0)
