"""Timing in fresh processes: each process times a share of the pairs (Kalibera and Jones 2013).

Memory layout, allocator state and kernel selection are drawn once per process and shared by all of its pairs. The
pairs of a race are therefore divided over K processes, each with its own warm-up. A task is pickled into a folder,
the run starts a process that reads it there, and the result is read back.
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from emad_ref.benchmark.clock import PairedTimings
from emad_ref.errors import EmadError
from emad_ref.files import open_atomic, read_bytes
from emad_ref.measurements.latency import WARM_UP, LatencyBenchmark, RequestBatches, TimingFunction, TimingResult
from emad_ref.measurements.model_under_test import ModelUnderTest, open_model
from emad_ref.measurements.operating_points import CandidatePoints
from emad_ref.measurements.run_resources import RunResources, SubprocessRunner
from emad_ref.measurements.study import Study
from emad_ref.measurements.task_scores import TaskScores
from emad_ref.measurements.traces import LensTraces
from emad_ref.measurements.verification import FlopVerification, ReplayValidity
from emad_ref.models.model_spec import FingerprintMismatch
from emad_ref.point import OperatingPoint
from emad_ref.probes.lens import attach_copies, attachments
from emad_ref.record import Floats, Ints

TASK, RESULT, OUTPUT = "task", "result", "output"  # files of a task's folder
SHOWN = 5  # last lines of the output, in messages
GENEROUS = 10.0  # a process beside busy neighbours may take some times as long; one that hangs takes for ever


class SubprocessFailed(EmadError):
    """A process that was started for one task ended without its result."""


class SubprocessTask(Protocol):
    """Crosses by pickle, as what ``run`` returns does: of a module that both processes can import."""

    def run(self, host: RunResources) -> Any: ...


def run_in_subprocess(afresh: SubprocessRunner, task: SubprocessTask, expected_s: float) -> Any:
    """What ``task.run`` returns in a process of its own.

    Args:
        expected_s: seconds that what it measures takes, as far as this process can tell.

    Raises:
        SubprocessFailed: the process ended without a result, or was ended because it took too long.
    """
    assert afresh.start is not None, "whoever hands over has asked whether anybody can"
    folder = Path(tempfile.mkdtemp(prefix="emad-afresh-"))
    _write(folder / TASK, task)
    limit = afresh.allowed_s + GENEROUS * expected_s
    try:
        status = afresh.start(folder / TASK, folder / OUTPUT, limit)
    except subprocess.TimeoutExpired as late:
        how = (
            f"was ended after {limit:.0f} s: {afresh.allowed_s:.0f} s to start in, and {GENEROUS:.0f} times the "
            f"{expected_s:.3g} s in which its requests were expected"
        )
        remedy = "mend what hangs, raise --emad-process-timeout where it only starts slowly"
        raise SubprocessFailed(_failure_message(how, folder / OUTPUT, remedy)) from late
    if status != 0 or not (folder / RESULT).exists():
        raise SubprocessFailed(_failure_message(_exit_description(status), folder / OUTPUT, "mend what it names"))
    result = pickle.loads(read_bytes(folder / RESULT, "result"))
    shutil.rmtree(folder)
    return result


def run_task_file(task: Path, host: RunResources) -> None:
    """In the fresh process: run the task of this file, and leave the result beside it."""
    asked: SubprocessTask = pickle.loads(read_bytes(task, "task"))
    _write(task.with_name(RESULT), asked.run(host))


def _write(path: Path, what: Any) -> None:
    with open_atomic(path, path.name) as file:
        file.write(pickle.dumps(what))


def _exit_description(status: int) -> str:
    if status < 0:
        return f"was ended by {Signals(-status).name}"
    return f"ended with status {status}" if status else "ended without a result"


def _failure_message(how: str, output: Path, remedy: str) -> str:
    said = read_bytes(output, "output").decode("utf-8", "replace").splitlines() if output.exists() else []
    last = " / ".join([line.strip() for line in said if line.strip("^~ ")][-SHOWN:]) or "nothing"
    return (
        f"a fresh process {how}, and what it was to measure is not measured; it printed last: {last}; all of it is in "
        f"{output}; {remedy}, or take --emad-budget smoke, which starts none"
    )


@dataclass(frozen=True, eq=False)
class TimingShare:
    """What one process times: the model ``name`` under ``study``, by ``racing`` what is drawn of each batch size.

    ``shape``     (prompt, new) tokens of a request.
    ``attached``  what points of this model name by digest: lenses, state translators.
    """

    name: str
    fingerprint: str
    study: Study
    racing: TimingFunction
    shape: tuple[int, int]
    attached: Mapping[str, Mapping[str, Any]]
    drawn: Mapping[int, RequestBatches]

    def run(self, host: RunResources) -> dict[int, TimingResult]:
        """Batch size → this share's pairs, timed.

        Raises:
            FingerprintMismatch: the model has changed since the run began.
            Unsupported, BadArgument, DecoderFailed: as the decoder under test raises them.
        """
        with open_model(self.name, self.study) as loaded:
            if loaded.fingerprint != self.fingerprint:
                raise FingerprintMismatch(f"{self.name!r} is not the model any more with which the run began")
            attach_copies(loaded.stepper, self.attached)
            subject = ModelUnderTest(loaded, self.study, host)
            points = CandidatePoints(
                LensTraces(subject), TaskScores(subject), FlopVerification(ReplayValidity(subject))
            )
            stopwatch = LatencyBenchmark(points, shape=self.shape)
            return {rows: self.racing(subject, stopwatch, rows, drawn) for rows, drawn in self.drawn.items()}


class ProcessReplicates:
    """Of one run: ``without`` says why its races stay in its own process, "" where they are divided."""

    def __init__(self, afresh: SubprocessRunner, subject: ModelUnderTest):
        self._afresh, self._subject, budget = afresh, subject, subject.budget
        self.without = f"the budget {budget.name} starts no others" if budget.processes == 1 else afresh.without
        if budget.processes > 1 and afresh.start is not None:
            self.without = ""

    def races(
        self,
        stopwatch: LatencyBenchmark,
        racing: TimingFunction,
        points: Collection[OperatingPoint],
        drawn: Mapping[int, RequestBatches],
    ) -> dict[int, TimingResult]:
        """Batch size of ``drawn`` → what ``racing`` gives of all pairs, ``process`` told.

        Raises:
            Unsupported: the decoder under test declines one of ``points``.
            SubprocessFailed: a process ended without its times, or timed other arms than another.
        """
        subject = self._subject
        for rows in drawn:
            for each in points:
                with subject.open(each, max_rows=rows):
                    pass  # what is declined is declined here, by name
        attached, shape = attachments(subject.stepper), stopwatch.request_shape

        def share(number: int, pairs: Ints) -> TimingShare:
            dealt = {rows: select_share(whole, pairs, number) for rows, whole in drawn.items()}
            return TimingShare(subject.name, subject.fingerprint, subject.study, racing, shape, attached, dealt)

        parts = self.shared(subject.budget.pairs, share, partial(stopwatch.expected_s, drawn))
        return {rows: join_shares([part[rows] for part in parts]).looked_at_afterwards(rows) for rows in drawn}

    def shared(
        self, pairs: int, share: Callable[[int, Ints], SubprocessTask], expected_s: Callable[[int], float]
    ) -> list[Any]:
        """What each process brings back of its ``share(number, pairs)``, in their order.

        ``expected_s``: seconds that so many pairs are expected to take.

        Raises:
            SubprocessFailed: a process ended without a result.
        """
        dealt = np.array_split(np.arange(pairs), self._subject.budget.processes)
        longest = expected_s(max(map(len, dealt)))
        named = f"{self._subject.name}: fresh processes"
        bar = tqdm(dealt, desc=named, file=self._subject.bars(), leave=False)
        return [run_in_subprocess(self._afresh, share(number, each), longest) for number, each in enumerate(bar)]


def select_share(drawn: RequestBatches, pairs: Ints, number: int) -> RequestBatches:
    """``pairs`` of all that is drawn, behind the same warm-up, in an order of arms that ``number`` draws."""
    batches = [*drawn.batches[:WARM_UP], *(drawn.batches[WARM_UP + pair] for pair in pairs)]
    audited = None
    if drawn.audited is not None:
        audited = [place for place, pair in enumerate(pairs) if pair in drawn.audited]
    return replace(drawn, batches=batches, audited=audited, seed=(*drawn.seed, number))


def require_same_arms(timed: Sequence[list[str]]) -> list[str]:
    """What each process timed, which must be the same. Raises SubprocessFailed where it is not."""
    arms = timed[0]
    if others := next((other for other in timed if other != arms), None):
        raise SubprocessFailed(f"one process timed {', '.join(arms)}, another {', '.join(others)}; run it again")
    return arms


def join_shares(parts: Sequence[TimingResult]) -> TimingResult:
    """All pairs of one batch size, in the order of ``parts``, one of each process.

    Raises:
        SubprocessFailed: they timed different arms.
    """
    arms = require_same_arms([list(part.seconds) for part in parts])
    counts = [len(part.prompts) for part in parts]
    starts = np.cumsum([0, *counts[:-1]]).tolist()

    def columns(which: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
        return {arm: np.concatenate([each[arm] for each in which]) for arm in which[0]}

    return TimingResult(
        PairedTimings(
            columns([part.timings.seconds for part in parts]),
            columns([part.timings.process_seconds for part in parts]),
            tuple(chain.from_iterable(part.timings.first for part in parts)),
        ),
        list(chain.from_iterable(part.prompts for part in parts)),
        {arm: list(chain.from_iterable(part.done[arm] for part in parts)) for arm in arms},
        [start + pair for start, part in zip(starts, parts, strict=True) for pair in part.audited],
        np.repeat(np.arange(len(parts)), counts),
        columns([part.opening for part in parts]),
        columns([part.executed for part in parts]),
        parts[0].entropy,
    )
