"""Latency of the decoder under test: paired requests at full depth, at a point and by the model's ``generate``.

All arms of a pair get the same fresh prompts and the same number of new tokens, without a stop token. Afterwards
``audit.spot_checks`` checks a few of the timed requests, drawn after the clock has stopped.

``generate`` also runs compiled, over a static cache, on an accelerator or under the largest budget. Each process
compiles before its clock starts, from Inductor's cache on disk. On a CPU compiling takes longer than all requests of a
smoke run (``emad-tiny``: 100 s), so smaller budgets skip that baseline with a note. A request of one row also runs by
``generate`` with prompt lookup, which drafts the continuation of an earlier equal n-gram.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from emad_ref.absent import Absent, reason_if_absent
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.speculation import SpeculationResult
from emad_ref.decoding.switching import SwitchingResult
from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import flops
from emad_ref.models.generation import LOOKUP, absent_drafting, make_prompt_lookup_generate
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import DECODE, PROMPT, Floats, Ints, Record
from pytest_emad.audit.finding import Finding, Tally
from pytest_emad.audit.reference_logits import is_decided_by_full_heads
from pytest_emad.audit.spot_checks import (
    TimedRequestOutputs,
    check_speedup_explained,
    check_timed_lengths,
    check_timed_requests,
)
from pytest_emad.benchmark.clock import WARM_UP, PairedTimings, minimum_detectable_speedup, time_call, time_pairs
from pytest_emad.benchmark.machine import PeakMemory, peak_memory, peak_memory_to_json
from pytest_emad.measurements.operating_points import CandidatePoints
from pytest_emad.measurements.study import BUDGETS, Budget, Study
from pytest_emad.statistics.legs import LEVEL
from pytest_emad.statistics.number_format import format_peak_memory
from pytest_emad.statistics.speedup import BLOCKS, PLANNED_INFLATION, estimate_total_speedup
from pytest_emad.statistics.units import ByPair

COUNTED_REQUESTS = 4  # requests whose FLOPs are counted, prompt included
INDICATIVE_PAIRS = 6  # pairs under ``smoke`` for non-deciding ratios
TIMING_SECONDS = 60.0  # bound on the timed part of a smoke run, kept by shortening requests
FEWEST_PROMPT, FEWEST_NEW = 8, 4  # least tokens of a request that measures decoding
LOOKUP_ROWS = 1  # rows of a request with transformers' drafts
PREFILL_REQUESTS = 6  # most requests with a separately timed first token
FULL, ADAPTIVE, GENERATE, COMPILED = "full", "adaptive", "generate", "compiled"
APPROXIMATE_SCHEDULES = ("copying", "translated")  # schedules with approximate states above an exit
FREEING_SCHEDULE = "monotone"  # depth never rises, so K/V above it may be freed
ENTROPY_BITS = 64  # bits of the seed that draws the audited requests
AUDITED_ROWS = 4  # audited rows of a batch size's requests
SWEEP_BATCH_SIZES = (1, 2, 4, 8, 16)
# On a quiet machine pairs vary by 7 %, so 12 pairs give ± 4.5 %: enough to detect EMAD-F2's gain of 10 %.
SWEEP_PAIRS = 12
LEAST_SWEEP_BUDGET = BUDGETS["standard"]

Decoding = Record | SwitchingResult | SpeculationResult  # outputs with a record
ArmOutput = Decoding | Ints  # without a record: the emitted tokens [rows, new]
Arm = Callable[[Sequence[Prompt]], ArmOutput]


@dataclass(frozen=True, eq=False)
class RequestBatchesByPair:
    """Requests to time: ``batches`` [warm-up + pairs] of [rows] prompts; ``seed`` of the order of arms.

    ``audited``: pairs, warm-up not counted, whose outputs are kept whole; None: a few, drawn after the last request.
    """

    batches: Sequence[Sequence[Prompt]]
    audited: Collection[int] | None
    seed: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TimingResult:
    """Arm → [pairs] wall-clock ``seconds``, with the arms' outputs and records from the timed run.

    ``prompts``   [pairs] of [rows] prompts, of one length.
    ``outputs``   arm → [pairs]: the whole output of ``audited`` pairs, of others only the emitted tokens.
    ``process``   int64 [pairs], the process that timed each; None: this process timed all.
    ``prefill_s`` decoder's arm → seconds to the first new token, of a few pairs.
    ``executed``  arm that keeps records → float64 [pairs, 2]: blocks run for decoded tokens, keys they attended to.
    ``entropy``   seed that drew ``audited`` after the last request; None: the caller named the pairs.
    """

    timings: PairedTimings
    prompts: Sequence[Sequence[Prompt]]
    outputs: Mapping[str, Sequence[ArmOutput | Sequence[Ints]]]
    audited: Collection[int]
    process: Ints | None = None
    prefill_s: Mapping[str, Floats] = field(default_factory=dict)
    executed: Mapping[str, Floats] = field(default_factory=dict)
    entropy: int | None = None

    @property
    def seconds(self) -> dict[str, Floats]:
        return self.timings.seconds

    def paired_seconds_by_arm(self) -> dict[str, ByPair]:
        """Arm → seconds [pairs], as intervals take them."""
        return {arm: ByPair(seconds, self.process) for arm, seconds in self.seconds.items()}

    def emitted_token_ids_by_arm(self) -> dict[str, list[Sequence[Ints]]]:
        """Arm → [pairs] of [rows] emitted tokens."""
        return {arm: [get_emitted_tokens(each) for each in outputs] for arm, outputs in self.outputs.items()}

    def audited_decodings(self, arm: str) -> list[Decoding]:
        """Outputs of an arm with records, for the audited pairs."""
        outputs = [self.outputs[arm][pair] for pair in self.audited]
        return [each for each in outputs if isinstance(each, Decoding)]

    def compute_detectable_speedups(self, threshold: float, legs: int) -> tuple[float, float]:
        """``compute_detectable_speedups`` by the larger variation: between pairs, or between processes."""
        levels = [
            self.seconds,
            {arm: column.independent_values for arm, column in self.paired_seconds_by_arm().items()},
        ]
        ups, downs = zip(*(compute_detectable_speedups(each, threshold, legs) for each in levels), strict=True)
        return max(ups), min(downs)

    def compute_skipped_share(self, arm: str, layers: int) -> float:
        """Share of blocks, of ``layers`` a token, that the rule of ``arm`` skipped in audited pairs."""
        tokens = [get_decoding_record(each).tokens for each in self.audited_decodings(arm)]
        depth = np.concatenate([each.depth[each.phase != PROMPT] for each in tokens])
        return 1 - float(depth.mean()) / layers


# times batches of this many rows; pickled for other processes, so it must not be a lambda
TimingFunction = Callable[["LatencyBenchmark", int, RequestBatchesByPair], TimingResult]
# ``ProcessReplicates.time_batch_sizes_over_processes``
ProcessDivision = Callable[
    ["LatencyBenchmark", TimingFunction, Collection[OperatingPoint], Mapping[int, RequestBatchesByPair]],
    dict[int, TimingResult],
]

NOT_DIVIDED = Absent("this caller divides no pairs")


class LatencyBenchmark:
    """Timings of one model, each taken on first use.

    ``divide``: divides the pairs over fresh processes; Absent: this process times all.
    ``shape``: of requests, if known.
    """

    def __init__(
        self,
        points: CandidatePoints,
        divide: ProcessDivision | Absent = NOT_DIVIDED,
        shape: tuple[int, int] | None = None,
    ):
        self._points, self.subject = points, points.subject
        self._divide, self._shape = divide, shape
        self._timed: dict[OperatingPoint, dict[int, TimingResult]] = {}
        self._swept: dict[OperatingPoint, dict[int, TimingResult]] = {}
        self._compiled_in = 0.0  # seconds, after the first attempt

    @cached_property
    def most_saving_point(self) -> OperatingPoint:
        """The most saving proposed point, regardless of quality."""
        if not self.subject.loaded.trained:
            return self._points.traces.profile.point(0.0)
        best = self._points.choose_most_saving(lambda loss: True)
        assert not isinstance(best, Absent), "some point is put forward"
        return best.point

    @cached_property
    def absent_compiled(self) -> Absent | None:
        """Why no compiled baseline runs; None if one does."""
        if not is_compiled_baseline_tried(self.subject.study):
            return Absent(
                "not tried on a CPU below the budget full: its warm-up takes minutes, though its steps are faster then"
            )
        compiled = time_call(partial(self.subject.absent_compiled_generate, self.subject.budget.batch_sizes))
        self._compiled_in = compiled.seconds
        return compiled.result

    @cached_property
    def absent_lookup(self) -> Absent | None:
        """Why ``generate`` cannot use prompt lookup, which serves one row at a time; None if it can."""
        if LOOKUP_ROWS not in self.subject.budget.batch_sizes:
            return Absent("the budget times no request of one row")
        if self.subject.is_seq2seq:
            return Absent("an encoder-decoder model: what it emits is not in its prompt")
        if absent := absent_drafting(self.subject.loaded.model):
            return Absent(f"prompt lookup: {absent.reason}")
        try:
            self._lookup(self.subject.make_equal_prompts(1, 8), 3)
        except ValueError as refusal:  # raised by transformers for a model with a cache that cannot crop tokens
            return Absent(f"prompt lookup: {str(refusal).strip().partition(chr(10))[0]}")
        return None

    def _lookup(self, prompts: Sequence[Prompt], new: int) -> Ints:
        (prompt,) = prompts
        return make_prompt_lookup_generate(self.subject.loaded.model, self.subject.stepper.device)(prompt, new)[None]

    # ------------------------------------------------------------ requests

    @cached_property
    def request_shape(self) -> tuple[int, int]:
        """(prompt tokens, new tokens) of a timed request, shortened for a slow model or a short context."""
        if self._shape is not None:
            return self._shape
        budget, room = self.subject.budget, (self.subject.stepper.max_positions or self.subject.window_size) - 1
        prompt = min(budget.prompt_tokens, room // 2)
        new = min(budget.new_tokens, room - prompt)
        if budget.rank:
            return prompt, new
        prefill, step = self._trial_seconds(prompt)
        return shorten_requests_to_fit_seconds(
            prompt, new, prefill, step, budget.pairs, budget.batch_sizes, self.n_arms
        )

    @property
    def n_pairs(self) -> int:
        """Timed pairs of each batch size; under ``smoke`` few for random weights, whose ratios do not decide."""
        budget = self.subject.budget
        return budget.pairs if budget.rank or self.subject.loaded.trained else min(INDICATIVE_PAIRS, budget.pairs)

    @property
    def n_indicative_pairs(self) -> int:
        """Pairs of a point that EMAD-F1 falsifies or does not judge: few under ``smoke`` for the reference decoder.

        Times of other decoders may reveal faults, even if they do not decide.
        """
        if self.subject.budget.rank or not self.subject.has_reference_decoder:
            return self.n_pairs
        return min(INDICATIVE_PAIRS, self.n_pairs)

    def make_requests(
        self, rows: int, pairs: int | None = None, audited: Collection[int] | None = None
    ) -> RequestBatchesByPair:
        """Fresh prompts for every pair (the budget's number by default) and the warm-up, drawn by the run's seed.

        They are fresh within a batch size: requests of several rows begin with the prompts of one row.
        """
        pairs = pairs or self.n_pairs
        prompts = self.subject.make_equal_prompts(rows * (pairs + WARM_UP), self.request_shape[0])
        batches = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
        return RequestBatchesByPair(batches, audited, (self.subject.seed,))

    def _trial_seconds(self, prompt: int) -> tuple[float, float]:
        """(Seconds of a prompt of this many tokens, of a step) at full depth in this process; medians of three."""
        with self.subject.open_decoder(self.subject.full_depth_point) as decoder:
            trial = self.subject.make_equal_prompts(1, prompt)
            decoder.generate(trial, 2, frozenset())

            def run(new: int, pair: int) -> Record:
                return decoder.generate(trial, new, frozenset())

            rng = np.random.default_rng(self.subject.seed)
            arms = {"one": partial(run, 1), "more": partial(run, 3)}
            seconds = time_pairs(arms, 3, rng, synchronize=decoder.synchronize).seconds
        step = max(float(np.median(seconds["more"] - seconds["one"])) / 2, 1e-4)
        return max(float(np.median(seconds["one"])) - step, 0.0), step

    def estimate_seconds(self, sizes: Collection[int], pairs: int) -> float:
        """Expected seconds of ``pairs`` and their warm-up at all ``sizes``, compilation included.

        The estimate assumes full depth's time for every arm, and the time of one row for every row.
        """
        length, new = self.request_shape
        prefill, step = self._trial_seconds(length)
        rows = sum(sizes) * (WARM_UP + pairs + PREFILL_REQUESTS)
        return self.n_arms * rows * (prefill + new * step) + self._compiled_in

    @property
    def n_arms(self) -> int:
        """Number of arms timed together at a point, in requests of one row."""
        return 3 + (not self.absent_compiled) + (not self.absent_lookup)

    # ------------------------------------------------------------ timings

    def time_point_by_batch_size(self, point: OperatingPoint, pairs: int | None = None) -> dict[int, TimingResult]:
        """Batch size → arms ``full``, ``adaptive`` (at ``point``), ``generate`` and, if they run, the other baselines.

        A point is timed once, with the ``pairs`` of the first call; by default the budget's.

        Raises:
            Unsupported: the decoder under test declines the point.
            SubprocessFailed: a fresh process ended without its times.
        """
        if point not in self._timed:
            time_requests = partial(LatencyBenchmark.time_point, point=point)
            requests = {rows: self.make_requests(rows, pairs) for rows in self.subject.budget.batch_sizes}
            self._timed[point] = self.run_timing_by_batch_size(
                time_requests, (self.subject.full_depth_point, point), requests
            )
        return self._timed[point]

    def time_extra_batch_sizes(self, point: OperatingPoint) -> dict[int, TimingResult]:
        """Time the arms of ``time_point_by_batch_size`` at non-deciding batch sizes, with ``SWEEP_PAIRS`` pairs."""
        if point not in self._swept:
            sizes = extra_batch_sizes(self.subject.study.budget)
            self._swept[point] = {
                rows: self.time_point(rows, self.make_requests(rows, SWEEP_PAIRS), point=point) for rows in sizes
            }
        return self._swept[point]

    def time_against_full_depth(self, points: Mapping[str, OperatingPoint], *, decides: bool = False) -> TimingResult:
        """Arm ``full`` and each of ``points`` on the same fresh prompts at batch 1; every record is kept.

        ``decides``: a verdict uses the times, which then come from fresh processes if the run has them. Raises as
        ``time_point_by_batch_size``.
        """
        if FULL in points:
            raise BadArgument("points", sorted(points), f"names other than {FULL!r}", "that arm is full depth")
        requests = self.make_requests(1, audited=range(self.n_pairs))
        if decides:
            time_requests = partial(LatencyBenchmark.time_points, points=points)
            return self.run_timing_by_batch_size(time_requests, points.values(), {1: requests})[1]
        return self.time_points(1, requests, points=points)

    def run_timing_by_batch_size(
        self,
        time_requests: TimingFunction,
        points: Collection[OperatingPoint] = (),
        requests: Mapping[int, RequestBatchesByPair] | None = None,
    ) -> dict[int, TimingResult]:
        """Batch size → ``time_requests`` of all pairs, in this process or divided over fresh ones.

        Raises as ``time_point_by_batch_size``.

        ``requests``: batch size → requests; by default the budget's batch sizes and pairs.
        """
        requests = requests or {rows: self.make_requests(rows) for rows in self.subject.budget.batch_sizes}
        if not isinstance(self._divide, Absent):
            return self._divide(self, time_requests, points, requests)
        return {rows: time_requests(self, rows, each) for rows, each in requests.items()}

    def time_points(
        self, rows: int, requests: RequestBatchesByPair, *, points: Mapping[str, OperatingPoint]
    ) -> TimingResult:
        """Full depth and ``points``, in this process."""
        with ExitStack() as stack:
            decoders = self._open(stack, {FULL: self.subject.full_depth_point, **points}, rows)
            return time_arms(self._decoder_arms(decoders), requests, decoders[FULL].synchronize)

    def time_point(self, rows: int, requests: RequestBatchesByPair, *, point: OperatingPoint) -> TimingResult:
        """Full depth, ``point`` and the baselines, in this process."""
        with ExitStack() as stack:
            decoders = self._open(stack, {FULL: self.subject.full_depth_point, ADAPTIVE: point}, rows)
            arms = self._decoder_arms(decoders) | self.make_baseline_arms(rows)
            timed = time_arms(arms, requests, decoders[FULL].synchronize)
            return replace(timed, prefill_s=time_first_tokens(decoders, requests))

    def make_baseline_arms(self, rows: int) -> dict[str, Arm]:
        """The model's ``generate`` for ``rows`` rows and, if they run, compiled ``generate`` and prompt lookup."""
        subject, new = self.subject, self.request_shape[1]
        arms: dict[str, Arm] = {GENERATE: lambda prompts: subject.generate_greedy(prompts, new)}
        if not self.absent_compiled:
            arms[COMPILED] = lambda prompts: subject.generate_greedy(prompts, new, compiled=True)
        if rows == LOOKUP_ROWS and not self.absent_lookup:
            arms[LOOKUP] = lambda prompts: self._lookup(prompts, new)
        return arms

    def _open(self, stack: ExitStack, points: Mapping[str, OperatingPoint], rows: int) -> dict[str, Decoder]:
        return {
            name: stack.enter_context(self.subject.open_decoder(point, max_rows=rows)) for name, point in points.items()
        }

    def _decoder_arms(self, decoders: Mapping[str, Decoder]) -> dict[str, Arm]:
        def arm(decoder: Decoder) -> Arm:
            return lambda prompts: decoder.generate(prompts, self.request_shape[1], frozenset())

        return {name: arm(decoder) for name, decoder in decoders.items()}

    # ------------------------------------------------------------ checks after the clock

    def check_point_outputs(self, timed: TimingResult, point: OperatingPoint) -> Finding:
        """Check that every arm emitted its claimed tokens while timed (``audit.spot_checks``).

        Under ``APPROXIMATE_SCHEDULES`` the model's own states do not determine tokens after an exit. Then the reference
        decoder decodes the same requests again, and tokens and depths must be equal.
        """
        full = {FULL: self.subject.full_depth_point}
        if point.schedule not in APPROXIMATE_SCHEDULES:
            return self.check_outputs(timed, full | {ADAPTIVE: point})
        others = replace(timed, outputs={arm: each for arm, each in timed.outputs.items() if arm != ADAPTIVE})
        finding = self.check_outputs(others, full)
        return finding if finding.passed is False else self._decoded_again(timed, point)

    def _decoded_again(self, timed: TimingResult, point: OperatingPoint) -> Finding:
        own = WalkedDecoder(self.subject.stepper, point, max_rows=len(timed.prompts[0]))
        tally = Tally("timed", needed=0)
        with tally:
            for pair in timed.audited:
                output = timed.outputs[ADAPTIVE][pair]
                assert isinstance(output, Record), "a decoder's arm keeps its records"
                again = own.generate(timed.prompts[pair], self.request_shape[1], frozenset())
                for row, (mine, theirs) in enumerate(zip(again.emitted, output.emitted, strict=True)):
                    same = np.array_equal(mine, theirs) and np.array_equal(
                        again.tokens.select_sequence(row).depth, output.tokens.select_sequence(row).depth
                    )
                    complaint = f"{ADAPTIVE}, row {row}: {theirs.tolist()}, but our own decoder {mine.tolist()}"
                    tally.require(same, complaint)
                    tally.n += len(mine)
        return tally.to_finding()

    def check_outputs(self, timed: TimingResult, points: Mapping[str, OperatingPoint]) -> Finding:
        """Check that arms of ``points`` emitted their claimed tokens, and all other arms the full-depth tokens."""
        rows, new = len(timed.prompts[0]), self.request_shape[1]
        finding = check_timed_lengths(timed.emitted_token_ids_by_arm(), rows, new)
        if finding.passed is False:
            return finding
        subject, point = self.subject, [*points.values()][-1]
        with subject.open_decoder(point, max_rows=rows) as decoder:
            capabilities = decoder.capabilities
        noisy = max(subject.tolerance, capabilities.logit_noise)
        tolerance = {arm: noisy if arm in points else subject.tolerance for arm in timed.outputs}
        audited_rows = None
        if rows > AUDITED_ROWS and is_decided_by_full_heads(point):
            seed = subject.seed if timed.entropy is None else timed.entropy
            audited_rows = np.random.default_rng([seed, rows]).choice(rows, AUDITED_ROWS, False).tolist()
        chosen = [_audited_request(timed, pair, points) for pair in timed.audited]
        counted = capabilities.counted
        check = check_timed_requests(
            chosen, points, new, subject.reference_lens, tolerance, counted=counted, rows=audited_rows
        )
        for arm in (arm for arm in timed.executed if arm != FULL and FULL in timed.executed):
            if check.passed is not False:
                fast = check_speedup_explained(arm, FULL, rows, timed.seconds, timed.executed)
                check = fast if fast.passed is False else check
        return check

    # ------------------------------------------------------------ report

    def make_timing_row(self, point: OperatingPoint) -> dict[str, Any]:
        """Time and FLOPs of a timed point, prompt included, for the empty columns of ``operating_points``."""
        timings = {str(rows): timed for rows, timed in self.time_point_by_batch_size(point).items()}
        ratios = {
            rows: estimate_total_speedup(seconds[FULL], seconds[ADAPTIVE]).value
            for rows, timed in timings.items()
            if (seconds := timed.paired_seconds_by_arm())
        }
        new = self.request_shape[1]
        rates = {
            rows: [float(int(rows) * new / np.median(timings[rows].seconds[arm])) for arm in (FULL, ADAPTIVE)]
            for rows in ratios
        }
        reduction = self._request_reduction(point)
        return {
            "model": self.subject.name,
            "name": point.name,
            "digest": point.digest,
            "end_to_end_reduction": reduction,
            "time_ratio": ratios,
            "tokens_per_s": rates,
            "peak_memory": peak_memory_to_json(self._peak_memory(timings.values())),
        }

    def _peak_memory(self, timings: Iterable[TimingResult]) -> PeakMemory | Absent:
        in_children = any(timed.process is not None for timed in timings)
        return peak_memory(self.subject.stepper.device, in_children=in_children)

    def _request_reduction(self, point: OperatingPoint) -> float | None:
        """Share of FLOPs saved in timed requests, prompt and decoding together; None without counts."""
        length, new = self.request_shape
        prompts, geometry = self.subject.make_equal_prompts(COUNTED_REQUESTS, length), self.subject.loaded.geometry
        totals = []
        for each in (self.subject.full_depth_point, point):
            with self.subject.open_decoder(each) as decoder:
                works = [decoder.generate([prompt], new, frozenset()).work for prompt in prompts]
            if any(work is None for work in works):
                return None
            totals.append(sum(flops(work[0], geometry).total for work in works if work is not None))
        return 1 - totals[1] / totals[0]

    def format_timing_note(self, point: OperatingPoint, threshold: float, legs: int) -> str:
        """One sentence about the timed requests, the machine, and the speed-ups that this budget can decide.

        ``threshold``: the speed-up to exceed. ``legs``: size of Holm's family for falsification; survival tests each
        leg alone.
        """
        sentences = []
        for rows, timed in self.time_point_by_batch_size(point).items():
            above, below = timed.compute_detectable_speedups(threshold, legs)
            sentences.append(f"batch {rows}: survives from {above:.3f}×, falsified up to {below:.3f}×")
        seeds = [
            f"{timed.entropy:#x}"
            for timed in self.time_point_by_batch_size(point).values()
            if timed.entropy is not None
        ]
        sentences += [f"pairs looked at afterwards were drawn by {', '.join(seeds)}"] if seeds else []
        compiled = f"; compiled in {self._compiled_in:.3g} s, outside the clock"
        if self.absent_compiled:
            compiled = f"; compiled baseline not run: {self.absent_compiled.reason}"
        return (
            f"{self.describe_timing(repr(point.name), self.time_point_by_batch_size(point))}; {'; '.join(sentences)} "
            f"(after correction over {legs} legs){compiled}"
        )

    def describe_timing(self, what: str, timings: Mapping[int, TimingResult]) -> str:
        """One sentence about any ``timings``: their arms (``what``), requests and machine."""
        length, new = self.request_shape
        first = next(iter(timings.values()))
        where = describe_timing_processes(first.process, self._divide)
        return (
            f"{self.subject.name}: timed {what}, {length} prompt + {new} new tokens, "
            f"{len(next(iter(first.seconds.values())))} pairs {where}, {torch.get_num_threads()} CPU threads"
        )

    def format_prefill_note(self, point: OperatingPoint) -> str:
        """One sentence about seconds of prefill and of each decoded token, and the K/V that the point frees."""
        timings, new, geometry = (
            self.time_point_by_batch_size(point),
            self.request_shape[1],
            self.subject.loaded.geometry,
        )
        times = []
        for rows, timed in timings.items():
            split = split_latency(timed.prefill_s, timed.seconds, new)
            arms = (f"{arm} {1e3 * first:.3g} ms and {1e3 * other:.3g} ms" for arm, (first, other) in split.items())
            times.append(f"batch {rows}: {', '.join(arms)}")
        element = self.subject.stepper.dtype.itemsize
        token_bytes = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * element  # K and V of one token
        freed = f"none may be freed under the {point.schedule} schedule, which fills all of it"
        if point.schedule == FREEING_SCHEDULE:
            skipped = next(iter(timings.values())).compute_skipped_share(ADAPTIVE, geometry.layers)
            freed = f"{100 * skipped:.1f} % of it may be freed while it decodes, as depth never rises (counted)"
        peak = self._peak_memory(timings.values())
        memory = f"peak memory unread: {peak.reason}" if isinstance(peak, Absent) else format_peak_memory(*peak)
        return (
            f"{self.subject.name} at {point.name!r}, to the first new token, and for each other: {'; '.join(times)}; "
            f"{memory}; K/V at full depth: {token_bytes:,} bytes a token, {freed}"
        )


def time_arms(arms: Mapping[str, Arm], requests: RequestBatchesByPair, synchronize: Callable[[], None]) -> TimingResult:
    """Time every arm on all ``requests`` in this process.

    Every column of a record is read while the clock runs, and copied.
    """
    outputs: dict[str, list[Any]] = {name: [] for name in arms}

    def timed_arm(name: str) -> Callable[[int], None]:
        def run(pair: int) -> None:
            recorded = arms[name](list(requests.batches[pair]))
            if isinstance(recorded, Record):
                recorded = Record.copied(recorded)
            outputs[name].append(np.array(recorded) if isinstance(recorded, np.ndarray) else recorded)

        return run

    pairs, rows = len(requests.batches) - WARM_UP, len(requests.batches[0])
    timed = {name: timed_arm(name) for name in arms}
    rng = np.random.default_rng(requests.seed)
    timings = time_pairs(timed, pairs, rng, synchronize=synchronize)
    entropy, audited = None, requests.audited
    if audited is None:
        entropy = secrets.randbits(ENTROPY_BITS)
        audited = draw_audited_pairs(entropy, rows, range(pairs))
    each = {name: recorded[WARM_UP:] for name, recorded in outputs.items()}
    outputs_kept = {
        name: [one if pair in audited else get_emitted_tokens(one) for pair, one in enumerate(recorded)]
        for name, recorded in each.items()
    }
    executed = {
        name: np.array([_executed_work(one) for one in recorded])
        for name, recorded in each.items()
        if all(isinstance(one, Record) for one in recorded)
    }
    return TimingResult(timings, requests.batches[WARM_UP:], outputs_kept, audited, executed=executed, entropy=entropy)


def time_first_tokens(decoders: Mapping[str, Decoder], requests: RequestBatchesByPair) -> dict[str, Floats]:
    """Decoder → [pairs] seconds of one new token after the first of these prompts."""

    def run(decoder: Decoder, pair: int) -> Record:
        return decoder.generate(requests.batches[pair], 1, frozenset())

    rng = np.random.default_rng(requests.seed)
    arms = {name: partial(run, decoder) for name, decoder in decoders.items()}
    pairs = min(PREFILL_REQUESTS, len(requests.batches) - WARM_UP)
    synchronize = next(iter(decoders.values())).synchronize
    return time_pairs(arms, pairs, rng, synchronize=synchronize).seconds


def split_latency(first: Mapping[str, Floats], whole: Mapping[str, Floats], new: int) -> dict[str, tuple[float, float]]:
    """Arm → median seconds to the first token, and for each of the other ``new`` − 1."""
    prefill = {arm: float(np.median(seconds)) for arm, seconds in first.items()}
    return {arm: (seconds, (float(np.median(whole[arm])) - seconds) / (new - 1)) for arm, seconds in prefill.items()}


def extra_batch_sizes(budget: Budget) -> tuple[int, ...]:
    """The non-deciding ``SWEEP_BATCH_SIZES`` under ``budget``; none below ``standard``."""
    if budget.rank < LEAST_SWEEP_BUDGET.rank:
        return ()
    return tuple(rows for rows in SWEEP_BATCH_SIZES if rows not in budget.batch_sizes)


def is_compiled_baseline_tried(study: Study) -> bool:
    """Whether a compiled baseline is tried: on an accelerator, or under the largest budget."""
    return study.device != "cpu" or study.budget.rank == len(BUDGETS) - 1


def describe_timing_processes(process: Ints | None, others: object) -> str:
    """Phrase about the timing processes: ``process`` [pairs]; None: only this one, since ``others`` are ``Absent``."""
    if process is None:
        return f"in this process alone ({reason_if_absent(others)})"
    sizes = np.unique(np.bincount(process))
    return f"in {process.max() + 1} fresh processes of {'–'.join(map(str, sizes))} pairs each"


def compute_detectable_speedups(seconds: Mapping[str, Floats], threshold: float, legs: int) -> tuple[float, float]:
    """(Smallest true speed-up shown above ``threshold``, largest shown below it), at a power of 80 %.

    Both are against the baseline with the largest variation. Survival is tested at 5 % a leg, falsification at 5 % over
    ``legs``.
    """
    own = seconds[ADAPTIVE] / seconds[ADAPTIVE].mean()
    spreads = [float((a / a.mean() - own).std(ddof=1)) for arm, a in seconds.items() if arm != ADAPTIVE]
    up, down = (
        minimum_detectable_speedup(
            max(spreads), len(own), threshold=threshold, error=error, units=BLOCKS[-1], inflation=PLANNED_INFLATION
        )
        for error in (LEVEL, LEVEL / legs)
    )
    return up, threshold**2 / down


def shorten_requests_to_fit_seconds(
    prompt: int, new: int, prefill: float, step: float, pairs: int, batch_sizes: Sequence[int], arms: int
) -> tuple[int, int]:
    """(prompt, new) tokens of a request, shortened equally so that all timed runs take about ``TIMING_SECONDS``.

    Prefill time grows with the rows; a ``step`` of a few rows takes about as long as one of one row.
    """
    expected = pairs * arms * (sum(batch_sizes) * prefill + len(batch_sizes) * new * step)
    share = min(1.0, TIMING_SECONDS / expected)
    return max(min(prompt, FEWEST_PROMPT), int(prompt * share)), max(min(new, FEWEST_NEW), int(new * share))


def draw_audited_pairs(entropy: int, rows: int, pairs: Collection[int]) -> list[int]:
    """Draw pairs of ``rows`` rows by ``entropy`` until there are ``AUDITED_ROWS`` rows."""
    most = min(len(pairs), max(1, AUDITED_ROWS // rows))
    return sorted(np.random.default_rng([entropy, rows]).choice(list(pairs), most, replace=False).tolist())


def get_decoding_record(output: Decoding) -> Record:
    return output if isinstance(output, Record) else output.record


def get_emitted_tokens(output: ArmOutput | Sequence[Ints]) -> Sequence[Ints]:
    """New tokens of each row."""
    return get_decoding_record(output).emitted if isinstance(output, Decoding) else list(output)


def _executed_work(record: Record) -> tuple[float, float]:
    """(blocks run for decoded tokens, keys that these attended to); NaN if tokens were drafted and verified.

    Excludes the prompt, which runs at full depth in every arm and would hide the savings of a step. Drafted tokens are
    verified several at once, so their number does not predict time.
    """
    tokens = record.tokens
    if not np.isin(tokens.phase, (PROMPT, DECODE)).all():
        return np.nan, np.nan
    depth, position = (column[tokens.phase == DECODE] for column in (tokens.depth, tokens.position))
    return float(depth.sum()), float((depth * (position + 1)).sum())


def _audited_request(timed: TimingResult, pair: int, points: Collection[str]) -> TimedRequestOutputs:
    outputs = {arm: rows[pair] for arm, rows in timed.outputs.items()}
    records = {arm: rows for arm, rows in outputs.items() if isinstance(rows, Record) and arm in points}
    emitted = {arm: get_emitted_tokens(rows) for arm, rows in outputs.items() if arm not in records}
    return TimedRequestOutputs(timed.prompts[pair], records, emitted)
