"""Latency of the decoder under test: paired requests at full depth, at a point and by the model's ``generate``.

All arms of a pair get the same fresh prompts and the same number of new tokens, without a stop token. ``generate``
also runs compiled on an accelerator or under the largest budget. Afterwards ``audit.timed`` checks what was emitted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from emad_ref.audit.answers import TimedRequest, no_faster_than_work, timed_lengths, timed_requests
from emad_ref.audit.finding import Finding, Tally
from emad_ref.audit.lens import is_read_from_logits
from emad_ref.benchmark.clock import Arm, PairedTimings, smallest_decidable_speedup, time_pairs
from emad_ref.benchmark.flops import flops
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.measurements.operating_points import CandidatePoints
from emad_ref.measurements.study import BUDGETS, Budget, Study
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import DECODE, PROMPT, Floats, Ints, Record
from emad_ref.statistics.legs import LEVEL
from emad_ref.statistics.speedup import BLOCKS, PLANNED_INFLATION, total_ratio
from emad_ref.statistics.units import ByPair

PREFILL_REQUESTS = 6  # requests of a race whose first token is timed by itself, at most
FREEING_SCHEDULE = "monotone"  # the schedule under which depth never rises again


def time_first_tokens(
    decoders: Mapping[str, Decoder], batches: Sequence[Sequence[Prompt]], warm_up: int, seed: tuple[int, ...]
) -> dict[str, Floats]:
    """Decoder → [pairs] seconds that one new token takes after the prompts of the first ``batches``."""

    def opening(decoder: Decoder) -> Arm:
        def run(pair: int) -> None:  # a number that an arm returns would be taken as its own measurement
            decoder.generate(batches[pair], 1, frozenset())

        return run

    return time_pairs(
        {name: opening(decoder) for name, decoder in decoders.items()},
        min(PREFILL_REQUESTS, len(batches) - warm_up),
        np.random.default_rng(seed),
        warm_up=warm_up,
        synchronize=next(iter(decoders.values())).synchronize,
    ).seconds


def split_latency(first: Mapping[str, Floats], whole: Mapping[str, Floats], new: int) -> dict[str, tuple[float, float]]:
    """Arm → seconds to the first token, and for each of the other ``new`` − 1; medians."""
    opened = {arm: float(np.median(seconds)) for arm, seconds in first.items()}
    return {arm: (seconds, (float(np.median(whole[arm])) - seconds) / (new - 1)) for arm, seconds in opened.items()}


def kv_bytes_per_token(geometry: Geometry, bytes_each: int) -> int:
    """K and V of one token at full depth."""
    return 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * bytes_each


def latency_sentence(
    races: Mapping[int, Mapping[str, tuple[float, float]]], held: int, skipped: float, schedule: str
) -> str:
    """One sentence: ``races`` batch size → ``split_latency``; ``skipped``: share of blocks that the point leaves
    out."""
    times = "; ".join(
        f"batch {rows}: "
        + ", ".join(f"{arm} {1e3 * one:.3g} ms and {1e3 * other:.3g} ms" for arm, (one, other) in arms)
        for rows, arms in ((rows, each.items()) for rows, each in races.items())
    )
    freed = f"none may be freed under the {schedule} schedule, which fills all of it"
    if schedule == FREEING_SCHEDULE:
        freed = f"{100 * skipped:.1f} % of it may be freed while it decodes, as depth never rises (counted)"
    return f"to the first new token, and for each other: {times}; K/V at full depth: {held:,} bytes a token, {freed}"


COUNTED_REQUESTS = 4  # whose FLOPs are counted, prompt included
TIMING_SECONDS = 60.0  # bound on the timed part of a smoke run, kept by shortening requests
FEWEST_PROMPT, FEWEST_NEW = 8, 4  # tokens below which a request is no longer decoding
WARM_UP = 2  # pairs that are not counted
FULL, ADAPTIVE, GENERATE, COMPILED = "full", "adaptive", "generate", "compiled"
APPROXIMATE_SCHEDULES = ("copying", "translated")  # schedules whose states above an exit are not the model's own
ENTROPY_BITS = 64  # of the seed that says, once the clock has stopped, what is looked at
AUDITED_ROWS = 4  # of the timed requests of a batch size, looked at after the clock

ArmOutput = Record | Ints  # what an arm made of a request: its record, or the tokens [rows, new] of one that keeps none


@dataclass(frozen=True, eq=False)
class RequestBatches:
    """Requests before they are timed: ``batches`` [warm-up + pairs] of [rows] prompts; ``seed`` of the order of arms.

    ``audited``: pairs, warm-up not counted, of which all is kept that the arms make of them; None: a few, which are
    drawn once the clock has stopped, so that nothing in the process knows them while it runs.
    """

    batches: Sequence[Sequence[Prompt]]
    audited: Collection[int] | None
    seed: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TimingResult:
    """Arm → [pairs] wall-clock ``seconds``, and what the arms emitted and recorded while the clock ran.

    ``prompts``  [pairs] of [rows] prompts, of one length.
    ``done``     arm → [pairs]; of ``audited`` pairs as it was, of the others no more than what was emitted.
    ``process``  int64 [pairs]: in which process each was timed; None: all in this one.
    ``opening``  decoder's arm → seconds to the first new token, of a few pairs (``apart``).
    ``executed`` arm that keeps records → float64 [pairs, 2]: blocks run for decoded tokens, and keys that these met.
    ``entropy``  drawn after the last request: the seed of what is looked at; None: ``audited`` was asked for.
    """

    timings: PairedTimings
    prompts: Sequence[Sequence[Prompt]]
    done: Mapping[str, Sequence[ArmOutput | Sequence[Ints]]]
    audited: Collection[int]
    process: Ints | None = None
    opening: Mapping[str, Floats] = field(default_factory=dict)
    executed: Mapping[str, Floats] = field(default_factory=dict)
    entropy: int | None = None

    def looked_at_afterwards(self, rows: int) -> TimingResult:
        """As it is, but of ``audited`` only as many as are looked at of so many rows, drawn now.

        Processes that timed a share each kept some of their own.
        """
        if self.entropy is None:
            return self
        entropy = secrets.randbits(ENTROPY_BITS)
        return replace(self, audited=draw_audited_pairs(entropy, rows, self.audited), entropy=entropy)

    @property
    def seconds(self) -> dict[str, Floats]:
        return self.timings.seconds

    def by_pair(self) -> dict[str, ByPair]:
        """Arm → seconds [pairs], as intervals take them."""
        return {arm: ByPair(seconds, self.process) for arm, seconds in self.seconds.items()}

    def decidable(self, threshold: float, legs: int) -> tuple[float, float]:
        """``decidable`` by what varies more: between pairs, or between the processes that they were timed in."""
        levels = [self.seconds, {arm: column.independent for arm, column in self.by_pair().items()}]
        ups, downs = zip(*(decidable_speedups(each, threshold, legs) for each in levels), strict=True)
        return max(ups), min(downs)

    def skipped(self, arm: str, layers: int) -> float:
        """Share of blocks, of ``layers`` a token, that the rule of ``arm`` left out where audited pairs decided."""
        records = [self.done[arm][pair] for pair in self.audited]
        tokens = [record.tokens for record in records if isinstance(record, Record)]
        depth = np.concatenate([each.depth[each.phase != PROMPT] for each in tokens])
        return 1 - float(depth.mean()) / layers


TimingFunction = Callable[
    [ModelUnderTest, "LatencyBenchmark", int, RequestBatches], TimingResult
]  # times so many rows; crosses by pickle, so no lambda
# ``process_replicates.ProcessReplicates.races``
ProcessDivision = Callable[
    ["LatencyBenchmark", TimingFunction, Collection[OperatingPoint], Mapping[int, RequestBatches]],
    dict[int, TimingResult],
]


class LatencyBenchmark:
    """Timings of one model, taken when first asked for and kept.

    ``divide``  divides a race over fresh processes; None: all run in this one, ``alone`` says why.
    ``shape``   of requests, where it is known.
    """

    def __init__(
        self,
        points: CandidatePoints,
        divide: ProcessDivision | None = None,
        alone: str = "",
        shape: tuple[int, int] | None = None,
    ):
        self._points, self._subject = points, points.subject
        self._divide, self._alone, self._shape = divide, alone, shape
        self._timed: dict[OperatingPoint, dict[int, TimingResult]] = {}
        self._compiled_in = 0.0  # seconds, once it was tried

    @cached_property
    def point(self) -> OperatingPoint:
        """Of the points put forward, the one that saves most, whatever its quality is."""
        if not self._subject.loaded.trained:
            return self._points.traces.profile.point(0.0)
        return max(self._points.losses, key=lambda loss: loss.net_reduction).point

    @cached_property
    def without_compiled(self) -> str:
        """Why no compiled baseline runs; empty where one does."""
        if not has_compiled_baseline(self._subject.study):
            return (
                "not tried on a CPU below the budget full: its warm-up takes minutes, though its steps are faster then"
            )
        start = time.perf_counter()
        said = self._subject.without_compiling(self._subject.budget.batch_sizes)
        self._compiled_in = time.perf_counter() - start
        return said

    def timed(self, point: OperatingPoint) -> dict[int, TimingResult]:
        """Batch size → arms ``full``, ``adaptive`` (at ``point``), ``generate`` and, where it runs, ``compiled``."""
        if point not in self._timed:
            self._timed[point] = self.races(partial(time_point, point), (self._subject.full, point))
        return self._timed[point]

    def races(
        self,
        racing: TimingFunction,
        points: Collection[OperatingPoint] = (),
        drawn: Mapping[int, RequestBatches] | None = None,
    ) -> dict[int, TimingResult]:
        """Batch size → what ``racing`` gives of all pairs, in this process or divided over fresh ones.

        ``drawn``: of each batch size, the budget's pairs; by default of all that the budget has.

        Raises:
            Unsupported: the decoder under test declines one of ``points``.
            SubprocessFailed: a fresh process ended without its times.
        """
        drawn = drawn or {rows: self.drawn(rows) for rows in self._subject.budget.batch_sizes}
        if self._divide is not None:
            return self._divide(self, racing, points, drawn)
        return {rows: racing(self._subject, self, rows, each) for rows, each in drawn.items()}

    @cached_property
    def request_shape(self) -> tuple[int, int]:
        """(prompt tokens, new tokens) of a timed request, shortened where the model is slow or its context short."""
        if self._shape is not None:
            return self._shape
        room = (self._subject.stepper.max_positions or self._subject.window) - 1
        prompt = min(self._subject.budget.prompt_tokens, room // 2)
        new = min(self._subject.budget.new_tokens, room - prompt)
        budget = self._subject.budget
        if budget.rank:
            return prompt, new
        prefill, step = self._tried(prompt)
        return affordable_request(prompt, new, prefill, step, budget.pairs, budget.batch_sizes, self.arms)

    def _tried(self, prompt: int) -> tuple[float, float]:
        """Seconds of a prompt of so many tokens, and of a step, at full depth in this process; medians of three."""
        with self._subject.open(self._subject.full) as decoder:
            (trial,) = self._subject.prompts(1, prompt)
            decoder.generate([trial], 2, frozenset())
            seconds = time_pairs(
                {"one": lambda _: _generate(decoder, [trial], 1), "more": lambda _: _generate(decoder, [trial], 3)},
                3, np.random.default_rng(self._subject.seed), synchronize=decoder.synchronize,
            ).seconds  # fmt: skip
        step = max(float(np.median(seconds["more"] - seconds["one"])) / 2, 1e-4)
        return max(float(np.median(seconds["one"])) - step, 0.0), step

    def expected_s(self, sizes: Collection[int], pairs: int) -> float:
        """Seconds of ``pairs`` and their warm-up at all ``sizes``, where every arm takes as long as full depth does
        here, and every row as long as one alone; with what compiling took."""
        length, new = self.request_shape
        prefill, step = self._tried(length)
        rows = sum(sizes) * (WARM_UP + pairs + PREFILL_REQUESTS)
        return self.arms * rows * (prefill + new * step) + self._compiled_in

    @property
    def arms(self) -> int:
        """How many are timed side by side at a point."""
        return 3 if self.without_compiled else 4

    def against_full(
        self, points: Mapping[str, OperatingPoint], rows: int = 1, *, decides: bool = False
    ) -> TimingResult:
        """Arm ``full`` and each of ``points`` on the same fresh prompts; every record is kept.

        ``decides``: a verdict rests on the times, which are taken in fresh processes where the run has them.

        Raises:
            Unsupported: the decoder under test declines one of them.
            SubprocessFailed: a fresh process ended without its times.
        """
        if FULL in points:
            raise BadArgument("points", sorted(points), f"names other than {FULL!r}", "that arm is full depth")
        drawn = self.drawn(rows, audited=range(self._subject.budget.pairs))
        if decides:
            return self.races(partial(time_points, points), points.values(), {rows: drawn})[rows]
        return time_points(points, self._subject, self, rows, drawn)

    def beside_full(self, points: Mapping[str, OperatingPoint], rows: int, drawn: RequestBatches) -> TimingResult:
        """Full depth and ``points`` on what is drawn of so many rows, in this process."""
        with ExitStack() as stack:
            decoders = self._open(stack, {FULL: self._subject.full, **points}, rows)
            arms = {name: _decoding_arm(decoder, self.request_shape[1]) for name, decoder in decoders.items()}
            return self.clocked(arms, drawn, decoders[FULL])

    def race(self, point: OperatingPoint, rows: int, drawn: RequestBatches) -> TimingResult:
        """Full depth, ``point`` and the baselines on what is drawn of so many rows, in this process."""
        new = self.request_shape[1]
        with ExitStack() as stack:
            decoders = self._open(stack, {FULL: self._subject.full, ADAPTIVE: point}, rows)
            arms = {name: _decoding_arm(decoder, new) for name, decoder in decoders.items()}
            timed = self.clocked(arms | self.baselines, drawn, decoders[FULL])
            return replace(timed, opening=time_first_tokens(decoders, drawn.batches, WARM_UP, drawn.seed))

    @property
    def baselines(self) -> dict[str, Callable[[list[Prompt]], ArmOutput]]:
        """The model's ``generate`` and, where it runs, its compiled twin."""
        subject, new = self._subject, self.request_shape[1]
        arms: dict[str, Callable[[list[Prompt]], ArmOutput]] = {
            GENERATE: lambda prompts: subject.own_greedy(prompts, new)
        }
        if not self.without_compiled:
            arms[COMPILED] = lambda prompts: subject.own_greedy(prompts, new, compiled=True)
        return arms

    def _open(self, stack: ExitStack, points: Mapping[str, OperatingPoint], rows: int) -> dict[str, Decoder]:
        return {name: stack.enter_context(self._subject.open(point, max_rows=rows)) for name, point in points.items()}

    def drawn(self, rows: int, pairs: int | None = None, audited: Collection[int] | None = None) -> RequestBatches:
        """Fresh prompts for every pair and the warm-up, as the seed has them.

        ``pairs``: the budget's by default. ``audited``: those of which all is kept; by default a few, drawn afterwards.
        """
        length, pairs = self.request_shape[0], pairs or self._subject.budget.pairs
        prompts = self._subject.prompts(rows * (pairs + WARM_UP), length)
        batches = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
        return RequestBatches(batches, audited, (self._subject.seed,))

    def clocked(
        self, arms: Mapping[str, Callable[[list[Prompt]], ArmOutput]], drawn: RequestBatches, clocked: Decoder
    ) -> TimingResult:
        """Every arm on what is ``drawn``, in this process.

        What a decoder returns is read to the last column while the clock runs, and kept in arrays of our own.
        """
        done: dict[str, list[Any]] = {name: [] for name in arms}

        def timed_arm(name: str) -> Callable[[int], None]:
            def run(pair: int) -> None:
                found = arms[name](list(drawn.batches[pair]))
                done[name].append(Record.copied(found) if isinstance(found, Record) else np.array(found))

            return run

        timings = time_pairs(
            {name: timed_arm(name) for name in arms},
            len(drawn.batches) - WARM_UP,
            np.random.default_rng(drawn.seed),
            warm_up=WARM_UP,
            synchronize=clocked.synchronize,
        )
        pairs, rows = len(drawn.batches) - WARM_UP, len(drawn.batches[0])
        entropy = secrets.randbits(ENTROPY_BITS) if drawn.audited is None else None
        audited = drawn.audited if entropy is None else draw_audited_pairs(entropy, rows, range(pairs))
        assert audited is not None, "either asked for, or drawn"
        each = {name: found[WARM_UP:] for name, found in done.items()}
        kept = {
            name: [one if pair in audited else _emitted_tokens(one) for pair, one in enumerate(found)]
            for name, found in each.items()
        }
        executed = {name: np.array([_executed_work(one) for one in found]) for name, found in each.items()
                    if all(isinstance(one, Record) for one in found)}  # fmt: skip
        return TimingResult(timings, drawn.batches[WARM_UP:], kept, audited, executed=executed, entropy=entropy)

    # ------------------------------------------------------------ after the clock

    def checked(self, point: OperatingPoint, rows: int) -> Finding:
        """Whether what was emitted at ``rows`` while the clock ran is what every arm claims of it: ``audit.timed``.

        Where states above an exit are made up, the model's own say nothing of what follows: there our own decoder
        decodes the same requests again, and tokens and depths must be the same.
        """
        return self.looked_through(self.timed(point)[rows], point, rows)

    def looked_through(self, timed: TimingResult, point: OperatingPoint, rows: int) -> Finding:
        """The same of any race at ``point``."""
        full = {FULL: self._subject.full}
        if point.schedule not in APPROXIMATE_SCHEDULES:
            return self.held(timed, full | {ADAPTIVE: point}, rows)
        others = replace(timed, done={arm: found for arm, found in timed.done.items() if arm != ADAPTIVE})
        beside, again = self.held(others, full, rows), self._again(timed, point, rows)
        return beside if beside.passed is False else again

    def _again(self, timed: TimingResult, point: OperatingPoint, rows: int) -> Finding:
        own, tally = WalkedDecoder(self._subject.stepper, point, max_rows=rows), Tally("timed", needed=0)
        with tally:
            for pair in timed.audited:
                found = timed.done[ADAPTIVE][pair]
                assert isinstance(found, Record), "a decoder's arm keeps its records"
                again = own.generate(timed.prompts[pair], self.request_shape[1], frozenset())
                for row, (mine, theirs) in enumerate(zip(again.emitted, found.emitted, strict=True)):
                    same = np.array_equal(mine, theirs) and np.array_equal(
                        again.tokens.of(row).depth, found.tokens.of(row).depth
                    )
                    tally.require(
                        same, f"{ADAPTIVE}, row {row}: {theirs.tolist()}, but our own decoder {mine.tolist()}"
                    )
                    tally.n += len(mine)
        return tally.finding()

    def held(self, timed: TimingResult, points: Mapping[str, OperatingPoint], rows: int) -> Finding:
        """The same of any requests: arms of ``points`` are held to those, all others to full depth."""
        new = self.request_shape[1]
        emitted = {arm: [_emitted_tokens(found) for found in each] for arm, each in timed.done.items()}
        finding = timed_lengths(emitted, rows, new)
        if finding.passed is False:
            return finding
        subject, point = self._subject, [*points.values()][-1]
        with subject.open(point, max_rows=rows) as decoder:
            capabilities = decoder.capabilities
        noisy = max(subject.tolerance, capabilities.logit_noise)
        tolerance = {arm: noisy if arm in points else subject.tolerance for arm in timed.done}
        looked_at = None
        if rows > AUDITED_ROWS and is_read_from_logits(point):
            seed = subject.seed if timed.entropy is None else timed.entropy
            looked_at = np.random.default_rng([seed, rows]).choice(rows, AUDITED_ROWS, False).tolist()
        chosen = [_audited_request(timed, pair, points) for pair in timed.audited]
        found = timed_requests(
            chosen, points, new, subject.lens, tolerance, counted=capabilities.counted, rows=looked_at
        )
        for arm in (arm for arm in timed.executed if arm != FULL and FULL in timed.executed):
            if found.passed is not False:
                fast = no_faster_than_work(arm, FULL, rows, timed.seconds, timed.executed)
                found = fast if fast.passed is False else found
        return found

    # ------------------------------------------------------------ what reports say

    def row(self, point: OperatingPoint) -> dict[str, Any]:
        """Time and FLOPs of a timed point, prompt included: what ``pointrows`` cannot know of it."""
        ratios = {
            str(rows): total_ratio(seconds[FULL], seconds[ADAPTIVE]).value
            for rows, timed in self.timed(point).items()
            if (seconds := timed.by_pair())
        }
        reduction = self._request_reduction(point)
        return {
            "model": self._subject.name,
            "name": point.name,
            "end_to_end_reduction": reduction,
            "time_ratio": ratios,
        }

    def _request_reduction(self, timed: OperatingPoint) -> float | None:
        """Share of FLOPs saved in timed requests, prompt and decoding together; None where nothing is counted."""
        length, new = self.request_shape
        prompts = self._subject.prompts(COUNTED_REQUESTS, length)
        totals = []
        for point in (self._subject.full, timed):
            with self._subject.open(point) as decoder:
                works = [decoder.generate([prompt], new, frozenset()).work for prompt in prompts]
            if any(work is None for work in works):
                return None
            geometry = self._subject.loaded.geometry
            totals.append(sum(flops(work[0], geometry).total for work in works if work is not None))
        return 1 - totals[1] / totals[0]

    def note(self, point: OperatingPoint, threshold: float, legs: int) -> str:
        """One sentence: what was timed, where, and from which speed-up on this budget decides.

        ``threshold``: the speed-up to exceed. ``legs``: of Holm's family, by which what falsifies is corrected; to
        survive, every leg stands alone.
        """
        said = []
        for rows, timed in self.timed(point).items():
            above, below = timed.decidable(threshold, legs)
            said.append(f"batch {rows}: survives from {above:.3f}×, falsified up to {below:.3f}×")
        seeds = [f"{timed.entropy:#x}" for timed in self.timed(point).values() if timed.entropy is not None]
        said += [f"pairs looked at afterwards were drawn by {', '.join(seeds)}"] if seeds else []
        compiled = f"; compiled in {self._compiled_in:.3g} s, outside the clock"
        if self.without_compiled:
            compiled = f"; compiled baseline not run: {self.without_compiled}"
        return (
            f"{self.told(repr(point.name), self.timed(point))}; {'; '.join(said)} "
            f"(after correction over {legs} legs){compiled}"
        )

    def apart(self, point: OperatingPoint) -> str:
        """One sentence: prefill and decoding apart, and the K/V that the point lets go (``apart``)."""
        geometry, races = self._subject.loaded.geometry, self.timed(point)
        seconds = {
            rows: split_latency(timed.opening, timed.seconds, self.request_shape[1]) for rows, timed in races.items()
        }
        held = kv_bytes_per_token(geometry, self._subject.stepper.dtype.itemsize)
        skipped = next(iter(races.values())).skipped(ADAPTIVE, geometry.layers)
        return f"{self._subject.name} at {point.name!r}, {latency_sentence(seconds, held, skipped, point.schedule)}"

    def told(self, what: str, races: Mapping[int, TimingResult]) -> str:
        """Of any ``races``: ``what`` was timed in them, on which requests, and where."""
        length, new = self.request_shape
        return (
            f"{self._subject.name}: timed {what}, {length} prompt + {new} new tokens, {self._subject.budget.pairs} "
            f"pairs {process_description(next(iter(races.values())).process, self._alone)}, "
            f"{torch.get_num_threads()} CPU threads"
        )


def process_description(process: Ints | None, alone: str) -> str:
    """Where pairs were timed: ``process`` [pairs]; None: all in this one, ``alone`` says why."""
    if process is None:
        return f"in this process alone ({alone})"
    sizes = np.unique(np.bincount(process))
    return f"in {process.max() + 1} fresh processes of {'–'.join(map(str, sizes))} pairs each"


def time_point(
    point: OperatingPoint, subject: ModelUnderTest, stopwatch: LatencyBenchmark, rows: int, drawn: RequestBatches
) -> TimingResult:
    """``LatencyBenchmark.race`` as one of its races."""
    return stopwatch.race(point, rows, drawn)


def time_points(
    points: Mapping[str, OperatingPoint],
    subject: ModelUnderTest,
    stopwatch: LatencyBenchmark,
    rows: int,
    drawn: RequestBatches,
) -> TimingResult:
    """``LatencyBenchmark.beside_full`` as one of its races."""
    return stopwatch.beside_full(points, rows, drawn)


def has_compiled_baseline(study: Study) -> bool:
    """Whether a compiled baseline is tried: on an accelerator, or under the largest budget."""
    return study.device != "cpu" or study.budget.rank == len(BUDGETS) - 1


def decidable_speedups(seconds: Mapping[str, Floats], threshold: float, legs: int) -> tuple[float, float]:
    """The smallest true speed-up that is shown above ``threshold``, and the largest that is shown below it, each with a
    power of 80 %: against that of the baselines beside which the point's time varies most.

    Surviving is tested at 5 % a leg, falsifying at 5 % over ``legs``.
    """
    own = seconds[ADAPTIVE] / seconds[ADAPTIVE].mean()
    spreads = [float((a / a.mean() - own).std(ddof=1)) for arm, a in seconds.items() if arm != ADAPTIVE]
    up, down = (
        smallest_decidable_speedup(
            max(spreads), len(own), threshold=threshold, error=error, units=BLOCKS[-1], inflation=PLANNED_INFLATION
        )
        for error in (LEVEL, LEVEL / legs)
    )
    return up, threshold**2 / down


def affordable_request(
    prompt: int, new: int, prefill: float, step: float, pairs: int, batch_sizes: Sequence[int], arms: int
) -> tuple[int, int]:
    """(prompt, new) tokens of a request, both shortened alike so that all timed runs take about ``TIMING_SECONDS``.

    Prompts cost by the token, so the ``prefill`` seconds of one row count for every row; a ``step`` of a few rows takes
    about as long as one of one row.
    """
    expected = pairs * arms * (sum(batch_sizes) * prefill + len(batch_sizes) * new * step)
    share = min(1.0, TIMING_SECONDS / expected)
    return max(min(prompt, FEWEST_PROMPT), int(prompt * share)), max(min(new, FEWEST_NEW), int(new * share))


def draw_audited_pairs(entropy: int, rows: int, pairs: Collection[int]) -> list[int]:
    """Of ``pairs`` of so many rows those looked at, drawn by ``entropy``: as many as have ``AUDITED_ROWS`` rows."""
    most = min(len(pairs), max(1, AUDITED_ROWS // rows))
    return sorted(np.random.default_rng([entropy, rows]).choice(list(pairs), most, replace=False).tolist())


def _executed_work(done: ArmOutput) -> tuple[float, float]:
    """(blocks run for decoded tokens of a record, keys that these met), as its depths have them; NaN of drafted ones.

    A prompt runs at full depth in every arm, all at once: counted with them, it would hide how much less a step does.
    Tokens that are drafted and verified run several at once: their number says nothing of time.
    """
    assert isinstance(done, Record), "only of arms that keep records"
    tokens = done.tokens
    if not np.isin(tokens.phase, (PROMPT, DECODE)).all():
        return np.nan, np.nan
    depth, position = (column[tokens.phase == DECODE] for column in (tokens.depth, tokens.position))
    return float(depth.sum()), float((depth * (position + 1)).sum())


def _decoding_arm(decoder: Decoder, new: int) -> Callable[[list[Prompt]], ArmOutput]:
    return lambda prompts: decoder.generate(prompts, new, frozenset())


def _generate(decoder: Decoder, prompts: Sequence[Prompt], new: int) -> None:
    """A timed arm returns nothing: a number would be taken as its own measurement."""
    decoder.generate(prompts, new, frozenset())


def _emitted_tokens(done: ArmOutput | Sequence[Ints]) -> Sequence[Ints]:
    return done.emitted if isinstance(done, Record) else list(done)


def _audited_request(timed: TimingResult, pair: int, points: Collection[str]) -> TimedRequest:
    done = {arm: found[pair] for arm, found in timed.done.items()}
    records = {arm: found for arm, found in done.items() if isinstance(found, Record) and arm in points}
    emitted = {arm: _emitted_tokens(found) for arm, found in done.items() if arm not in records}
    return TimedRequest(timed.prompts[pair], records, emitted)


SWEEP_BATCH_SIZES = (1, 2, 4, 8, 16)
SWEEP_PAIRS = 12
LEAST_SWEEP_BUDGET = BUDGETS["standard"]  # the smallest budget that sweeps


def extra_batch_sizes(budget: Budget) -> tuple[int, ...]:
    """Of ``BATCHES`` those that ``budget`` does not decide at; none below ``standard``."""
    return (
        ()
        if budget.rank < LEAST_SWEEP_BUDGET.rank
        else tuple(rows for rows in SWEEP_BATCH_SIZES if rows not in budget.batch_sizes)
    )


class BatchSizeSweep:
    """Of the decoder under test, timed when first asked for and kept."""

    def __init__(self, stopwatch: LatencyBenchmark, budget: Budget):
        self._stopwatch, self._batches = stopwatch, extra_batch_sizes(budget)
        self._timed: dict[OperatingPoint, dict[int, TimingResult]] = {}

    def timed(self, point: OperatingPoint) -> dict[int, TimingResult]:
        """Batch size → the arms of ``LatencyBenchmark.timed``, from ``PAIRS`` pairs."""
        if point not in self._timed:
            watch = self._stopwatch
            self._timed[point] = {
                rows: watch.race(point, rows, watch.drawn(rows, SWEEP_PAIRS)) for rows in self._batches
            }
        return self._timed[point]

    def checked(self, point: OperatingPoint, rows: int) -> Finding:
        """As ``LatencyBenchmark.checked``."""
        return self._stopwatch.looked_through(self.timed(point)[rows], point, rows)
