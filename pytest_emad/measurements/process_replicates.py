"""Timing in fresh processes: each process times a share of the pairs (Kalibera and Jones 2013).

Each process has one memory layout, allocator state and kernel selection for all of its pairs. So the pairs of a race
are divided over K processes, each with its own warm-up. Together they time the same requests as a single process.

The run pickles a task into a folder, starts a process that executes it, and reads the result back. It kills a process
that takes longer than its start and ``GENEROUS`` times its expected work. A failed or killed process raises
SubprocessFailed, and its folder is kept; this process does not measure instead.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
from tqdm import tqdm

from emad_ref.absent import Absent
from emad_ref.errors import EmadError
from emad_ref.files import open_for_atomic_write, read_bytes
from emad_ref.models.model_spec import FingerprintMismatch
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import attach_collected_tensors, collect_attachments
from emad_ref.record import Floats, Ints
from pytest_emad.benchmark.clock import WARM_UP, PairedTimings
from pytest_emad.measurements.latency import (
    ENTROPY_BITS,
    LatencyBenchmark,
    RequestBatchesByPair,
    TimingFunction,
    TimingResult,
    draw_audited_pairs,
)
from pytest_emad.measurements.model_under_test import ModelUnderTest, open_model
from pytest_emad.measurements.operating_points import CandidatePoints
from pytest_emad.measurements.replay_and_flop_checks import FlopVerification, ReplayValidity
from pytest_emad.measurements.run_resources import RunResources, SubprocessRunner
from pytest_emad.measurements.study import Study
from pytest_emad.measurements.task_scores import TaskScores
from pytest_emad.measurements.traces import LensTraces

TASK, RESULT, OUTPUT = "task", "result", "output"  # files of a task's folder
SHOWN = 5  # last lines of the output shown in messages
GENEROUS = 10.0  # factor of the expected time: busy neighbours may slow a process several times


class SubprocessFailed(EmadError):
    """A process that was started for one task ended without its result."""


# runs in another process; task and result are pickled, so both processes must import their modules
SubprocessTask = Callable[[RunResources], Any]


def run_in_subprocess(runner: SubprocessRunner, task: SubprocessTask, expected_s: float) -> Any:
    """Run ``task`` in its own process and return its result; ``expected_s``: seconds that its requests should take.

    Raises:
        SubprocessFailed: the process ended without a result, or was killed because it took too long.
    """
    assert not isinstance(runner.start, Absent), "the caller checks that a runner starts processes"
    folder = Path(tempfile.mkdtemp(prefix="emad-afresh-"))
    _write(folder / TASK, task)
    limit = runner.allowed_s + GENEROUS * expected_s
    try:
        status = runner.start(folder / TASK, folder / OUTPUT, limit)
    except subprocess.TimeoutExpired as late:
        how = (
            f"was ended after {limit:.0f} s: {runner.allowed_s:.0f} s to start in, and {GENEROUS:.0f} times the "
            f"{expected_s:.3g} s in which its requests were expected"
        )
        remedy = "mend what hangs, raise --emad-process-timeout where it only starts slowly"
        raise SubprocessFailed(_failure_message(how, folder / OUTPUT, remedy)) from late
    if status != 0 or not (folder / RESULT).exists():
        raise SubprocessFailed(_failure_message(_exit_description(status), folder / OUTPUT, "mend what it names"))
    result = pickle.loads(read_bytes(folder / RESULT, "result"))
    shutil.rmtree(folder)
    return result


def run_task_file(path: Path, resources: RunResources) -> None:
    """Run the task of this file in the fresh process, and write the result next to it."""
    task: SubprocessTask = pickle.loads(read_bytes(path, "task"))
    _write(path.with_name(RESULT), task(resources))


def _write(path: Path, what: Any) -> None:
    with open_for_atomic_write(path, path.name) as file:
        file.write(pickle.dumps(what))


def _exit_description(status: int) -> str:
    if status < 0:
        return f"was ended by {Signals(-status).name}"
    return f"ended with status {status}" if status else "ended without a result"


def _failure_message(how: str, output: Path, remedy: str) -> str:
    lines = read_bytes(output, "output").decode("utf-8", "replace").splitlines() if output.exists() else []
    last = " / ".join([line.strip() for line in lines if line.strip("^~ ")][-SHOWN:]) or "nothing"
    return (
        f"a fresh process {how}, and what it was to measure is not measured; it printed last: {last}; all of it is in "
        f"{output}; {remedy}, or take --emad-budget smoke, which starts none"
    )


def time_model_as_subprocess_task(
    resources: RunResources,
    *,
    name: str,
    fingerprint: str,
    study: Study,
    time_requests: TimingFunction,
    shape: tuple[int, int],
    attached: Mapping[str, Mapping[str, Any]],
    requests: Mapping[int, RequestBatchesByPair],
) -> dict[int, TimingResult]:
    """Batch size → times of the pairs that one process times, of the model ``name`` under ``study``.

    ``shape``: (prompt, new) tokens of a request. ``attached``: lenses and state translators that points name by digest.

    Raises:
        FingerprintMismatch: the model has changed since the run began.
        Unsupported, BadArgument, DecoderFailed: as the decoder under test raises them.
    """
    with open_model(name, study) as loaded:
        if loaded.fingerprint != fingerprint:
            raise FingerprintMismatch(f"{name!r} is not the model any more with which the run began")
        attach_collected_tensors(loaded.stepper, attached)
        subject = ModelUnderTest(loaded, study, resources)
        points = CandidatePoints(LensTraces(subject), TaskScores(subject), FlopVerification(ReplayValidity(subject)))
        benchmark = LatencyBenchmark(points, shape=shape)
        return {rows: time_requests(benchmark, rows, each) for rows, each in requests.items()}


class ProcessReplicates:
    """Divides the pairs of one run over fresh processes; ``absent``: why not, None if it does."""

    def __init__(self, runner: SubprocessRunner, subject: ModelUnderTest):
        self._runner, self._subject, budget = runner, subject, subject.budget
        self.absent = runner.start if isinstance(runner.start, Absent) else None
        if budget.processes == 1:
            self.absent = Absent(f"the budget {budget.name} starts no others")

    def time_batch_sizes_over_processes(
        self,
        benchmark: LatencyBenchmark,
        time_requests: TimingFunction,
        points: Collection[OperatingPoint],
        requests: Mapping[int, RequestBatchesByPair],
    ) -> dict[int, TimingResult]:
        """Batch size → ``time_requests`` of all pairs; each process times all sizes, so that it loads the model once.

        Raises:
            Unsupported: the decoder under test declines one of ``points``.
            SubprocessFailed: a process ended without its times, or timed other arms than another.
        """
        subject = self._subject
        for rows in requests:
            for each in points:
                with subject.open_decoder(each, max_rows=rows):
                    pass  # raises by name if the decoder declines the point
        timing = partial(
            time_model_as_subprocess_task,
            name=subject.name,
            fingerprint=subject.fingerprint,
            study=subject.study,
            time_requests=time_requests,
            shape=benchmark.request_shape,
            attached=collect_attachments(subject.stepper),
        )

        def share(number: int, pairs: Ints) -> SubprocessTask:
            own = {rows: select_requests(whole, pairs, number) for rows, whole in requests.items()}
            return partial(timing, requests=own)

        parts = self.run_request_shares_in_processes(
            subject.budget.pairs, share, partial(benchmark.estimate_seconds, requests)
        )
        return {rows: join_timings([part[rows] for part in parts]) for rows in requests}

    def run_request_shares_in_processes(
        self, pairs: int, share: Callable[[int, Ints], SubprocessTask], expected_s: Callable[[int], float]
    ) -> list[Any]:
        """Results of each process's ``share(number, pairs)``, in order.

        ``expected_s``: number of pairs → expected seconds. Raises SubprocessFailed.
        """
        split = np.array_split(np.arange(pairs), self._subject.budget.processes)
        longest = expected_s(max(map(len, split)))
        bar = tqdm(
            split, desc=f"{self._subject.name}: fresh processes", file=self._subject.get_progress_stream(), leave=False
        )
        return [run_in_subprocess(self._runner, share(number, each), longest) for number, each in enumerate(bar)]


def select_requests(requests: RequestBatchesByPair, pairs: Ints, number: int) -> RequestBatchesByPair:
    """``pairs`` of all ``requests``, behind the same warm-up, in an order of arms drawn by ``number``."""
    batches = [*requests.batches[:WARM_UP], *(requests.batches[WARM_UP + pair] for pair in pairs)]
    audited = None
    if requests.audited is not None:
        audited = [place for place, pair in enumerate(pairs) if pair in requests.audited]
    return replace(requests, batches=batches, audited=audited, seed=(*requests.seed, number))


def join_timings(parts: Sequence[TimingResult]) -> TimingResult:
    """Join the pairs of one batch size, in the order of ``parts``, one per process.

    Each process kept a few whole outputs; the audited ones are drawn here, after the last request of all.

    Raises:
        SubprocessFailed: the processes timed different arms.
    """
    arms = list(parts[0].seconds)
    if others := next((list(part.seconds) for part in parts if list(part.seconds) != arms), None):
        raise SubprocessFailed(f"one process timed {', '.join(arms)}, another {', '.join(others)}; run it again")
    counts = [len(part.prompts) for part in parts]
    starts = np.cumsum([0, *counts[:-1]]).tolist()

    def columns(which: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
        return {arm: np.concatenate([each[arm] for each in which]) for arm in which[0]}

    audited: Collection[int] = [
        start + pair for start, part in zip(starts, parts, strict=True) for pair in part.audited
    ]
    entropy = parts[0].entropy
    if entropy is not None:
        entropy = secrets.randbits(ENTROPY_BITS)
        audited = draw_audited_pairs(entropy, len(parts[0].prompts[0]), audited)
    return TimingResult(
        PairedTimings(
            columns([part.timings.seconds for part in parts]),
            columns([part.timings.process_seconds for part in parts]),
            tuple(chain.from_iterable(part.timings.first for part in parts)),
        ),
        list(chain.from_iterable(part.prompts for part in parts)),
        {arm: list(chain.from_iterable(part.outputs[arm] for part in parts)) for arm in arms},
        audited,
        np.repeat(np.arange(len(parts)), counts),
        columns([part.prefill_s for part in parts]),
        columns([part.executed for part in parts]),
        entropy,
    )
