"""Dispatch units of work to workers and take their results in the order of the units.

``open_workers(address)`` opens what ``--executor`` names:

    here                 no workers: this process does the work itself
    processes:4          four processes of this machine, one thread each; ``processes:4x2``: two threads each
    dask://HOST:PORT     the workers of a Dask scheduler (extra ``cluster``)
    slurm://FOLDER       jobs of Slurm, four at once by default, ``slurm://FOLDER?jobs=16&slurm_partition=gpu``: every
                         other key is submitit's; logs and pickles go to FOLDER, which all machines see

Results come in the order of the units, so that sums of floats do not depend on the number of workers. A unit whose
worker dies is submitted again, at most ``MAX_LOSSES`` times in a row. An exception of the function itself is raised to
the caller.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from emad_ref.errors import BadArgument, EmadError

UNITS_PER_WORKER = 4  # units out per worker: one at work, others waiting behind one that takes long (docs/scale.md)
MAX_LOSSES = 3  # times in a row that a unit may be lost before it is the unit's fault

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class WorkersLost(EmadError):
    """Workers died one after another, and no unit was finished in between."""


@dataclass(frozen=True, eq=False)
class WorkerPool:
    """Workers, and how to get them.

    ``name``     of what they are, for messages: ``4 processes``, ``dask://10.0.0.1:8786``.
    ``engage``   an executor of them, which outlives any of them.
    ``ahead``    units that are out at once: enough that nobody waits, few enough to hold in memory.
    ``deaths``   exceptions that say that a worker died and not that its function failed.
    ``alone``    those of them that have a machine to themselves, one unit at a time on each; None: all of them have.
    """

    name: str
    engage: Callable[[], Executor]
    ahead: int
    deaths: tuple[type[BaseException], ...] = (BrokenExecutor,)
    alone: WorkerPool | None = None


def dispatch_in_order(
    crew: WorkerPool, function: Callable[[Unit], Result], units: Iterable[Unit]
) -> Iterator[tuple[Unit, Result]]:
    """Each unit and what ``function`` made of it, in the order of ``units``. Both cross to workers by pickle.

    What is out when the caller stops early is cancelled, or finished and thrown away.

    Raises:
        WorkersLost: nobody who has a unit stays alive.
    """
    source, out, lost = iter(units), deque[tuple[Unit, Future[Result]]](), 0
    executor = crew.engage()
    try:
        while True:
            for unit in source:
                out.append((unit, executor.submit(function, unit)))
                if len(out) >= crew.ahead:
                    break
            if not out:
                return
            unit, future = out[0]
            try:
                result = future.result()
            except crew.deaths as death:
                lost += 1
                if lost >= MAX_LOSSES:
                    raise WorkersLost(
                        f"{crew.name}: workers died {lost} times in a row on the same unit ({type(death).__name__}: "
                        f"{death}), but expected them to stay; is there memory enough? what was kept can be resumed"
                    ) from death
                out[0] = unit, executor.submit(function, unit)
                continue
            lost = 0
            out.popleft()
            yield unit, result
    finally:
        for _, future in out:  # not every executor cancels what waits when it is shut down
            future.cancel()
        executor.shutdown(wait=False)


def dispatch_exclusively(
    crew: WorkerPool, function: Callable[[Unit], Result], units: Iterable[Unit], measures: Callable[[Unit], bool]
) -> Iterator[tuple[Unit, Result]]:
    """As ``dispatch_in_order``, but nothing is at work beside a unit that ``measures`` on the machine where it is.

    Where workers share a machine what measures nothing comes first, and is through before the rest begins.
    """
    if crew.alone is None:
        yield from dispatch_in_order(crew, function, units)
        return
    known = [(unit, measures(unit)) for unit in units]
    yield from dispatch_in_order(crew, function, [unit for unit, timed in known if not timed])
    yield from dispatch_in_order(crew.alone, function, [unit for unit, timed in known if timed])


R = TypeVar("R")
Engage = Callable[[], Executor]


class ExclusiveExecutor(Executor):
    """``engage``: how to get each of the executors, at first and where one is broken. Units wait for a free one."""

    def __init__(self, engage: Sequence[Engage]):
        self._free: SimpleQueue[tuple[Engage, Executor]] = SimpleQueue()
        for each in engage:
            self._free.put((each, each()))
        self._threads = ThreadPoolExecutor(len(engage))  # they wait, each for one executor

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        return self._threads.submit(self._run, partial(fn, *args, **kwargs))

    def _run(self, unit: Callable[[], R]) -> R:
        engage, executor = self._free.get()
        try:
            return executor.submit(unit).result()
        except BrokenExecutor:
            executor.shutdown(wait=False)
            executor = engage()
            raise
        finally:
            self._free.put((engage, executor))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What is at work is finished; its executor ends with the process."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        while not self._free.empty():
            self._free.get()[1].shutdown(wait)


HERE = "here"
EXECUTOR_FORMS = "here, processes:N, processes:NxTHREADS, dask://HOST:PORT, slurm://FOLDER"
PROCESSES_PATTERN = re.compile(r"processes:([1-9]\d{0,3})(?:x([1-9]\d{0,2}))?")
DEFAULT_JOBS = 4


@contextmanager
def open_workers(address: str) -> Iterator[WorkerPool | None]:
    """The crew at ``address``, let go at the end of the block; None for ``here``.

    Raises:
        BadArgument: an address of no known form, a package that is not installed, a scheduler out of reach, or one
            without workers.
    """
    if address == HERE:
        yield None
    elif found := PROCESSES_PATTERN.fullmatch(address):
        yield _process_pool(int(found[1]), int(found[2] or 1))
    elif address.startswith("dask://"):
        with _dask(address) as crew:
            yield crew
    elif address.startswith("slurm://"):
        yield _slurm(address)
    else:
        raise BadArgument("executor", address, f"one of {EXECUTOR_FORMS}")


def _process_pool(count: int, threads: int) -> WorkerPool:
    def engage() -> Executor:
        fresh = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=fresh, initializer=partial(_init_worker, threads))

    alone = _process_pool(1, threads) if count > 1 else None
    return WorkerPool(
        f"{count} processes", partial(ExclusiveExecutor, [engage] * count), UNITS_PER_WORKER * count, alone=alone
    )


def _init_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: the parent alone reports it
    import torch

    os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that this one starts
    torch.set_num_threads(threads)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process that was started by a pool"
    parent.join()
    os._exit(1)


def _dask(address: str) -> AbstractContextManager[WorkerPool]:
    try:
        from emad_ref.workers.dask_executor import open_dask_workers
    except ImportError as error:
        remedy = "pip install 'pytest-emad[cluster]'"
        raise BadArgument("executor", address, "the package distributed", remedy) from error
    return open_dask_workers(address)


def _slurm(address: str) -> WorkerPool:
    try:
        from emad_ref.workers.slurm_executor import JobLost, SlurmExecutor
    except ImportError as error:
        raise BadArgument("executor", address, "the package submitit", "pip install 'pytest-emad[slurm]'") from error
    parts = urlsplit(address)
    folder, options = parts.netloc + parts.path, dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    jobs = options.pop("jobs", str(DEFAULT_JOBS))
    if not folder or not jobs.isdecimal() or int(jobs) < 1:
        raise BadArgument("executor", address, "slurm://FOLDER with jobs=N, N ≥ 1", "slurm:///shared/jobs?jobs=16")
    crew = partial(WorkerPool, address, deaths=(BrokenExecutor, JobLost))
    alone = crew(engage=partial(SlurmExecutor, folder, options, exclusive=True), ahead=UNITS_PER_WORKER * int(jobs))
    if options.get("cluster") == "local":  # jobs are processes of this machine
        alone = crew(engage=partial(SlurmExecutor, folder, options), ahead=1)
    return crew(engage=partial(SlurmExecutor, folder, options), ahead=UNITS_PER_WORKER * int(jobs), alone=alone)
