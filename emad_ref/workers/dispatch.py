"""Dispatch units of work to a ``concurrent.futures`` executor and take their results in the order of the units.

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

import ctypes
import multiprocessing
import os
import platform
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from emad_ref.errors import BadArgument, EmadError

UNITS_PER_WORKER = 4  # submitted units per worker: one at work, others waiting behind a slow one (docs/scale.md)
MAX_LOSSES = 3  # consecutive losses of a unit after which the unit counts as the cause
HERE = "here"
EXECUTOR_FORMS = "here, processes:N, processes:NxTHREADS, dask://HOST:PORT, slurm://FOLDER"
PROCESSES_PATTERN = re.compile(r"processes:([1-9]\d{0,3})(?:x([1-9]\d{0,2}))?")
DEFAULT_JOBS = 4
NANNY_TRIM_THRESHOLD = "65536"  # Dask's default of MALLOC_TRIM_THRESHOLD_; any other value is a user's choice
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_REUSED = 32 << 20  # bytes; the most that glibc's own adjustment comes to

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class WorkersLost(EmadError):
    """Workers died several times in a row on the same unit."""


@dataclass(frozen=True, eq=False)
class WorkerPool:
    """Workers of one kind.

    ``name``    for messages: ``4 processes``, ``dask://10.0.0.1:8786``.
    ``open``    opens an executor of them.
    ``ahead``   units submitted at once: enough that no worker waits, few enough to hold in memory.
    ``deaths``  exceptions that mean that a worker died, not that its function failed.
    """

    name: str
    open: Callable[[], Executor]
    ahead: int
    deaths: tuple[type[BaseException], ...] = (BrokenExecutor,)


def dispatch_in_order(
    pool: WorkerPool, function: Callable[[Unit], Result], units: Iterable[Unit]
) -> Iterator[tuple[Unit, Result]]:
    """Each unit and its result of ``function``, in the order of ``units``. Both are pickled for workers.

    If the caller stops early, pending units are cancelled, or finished and discarded.

    Raises:
        WorkersLost: the workers of one unit died ``MAX_LOSSES`` times in a row.
    """
    source, out, losses = iter(units), deque[tuple[Unit, Future[Result]]](), 0
    executor = pool.open()
    try:
        while True:
            for unit in source:
                out.append((unit, executor.submit(function, unit)))
                if len(out) >= pool.ahead:
                    break
            if not out:
                return
            unit, future = out[0]
            try:
                result = future.result()
            except pool.deaths as death:
                losses += 1
                if losses >= MAX_LOSSES:
                    raise WorkersLost(
                        f"{pool.name}: workers died {losses} times in a row on the same unit ({type(death).__name__}: "
                        f"{str(death).strip().partition(chr(10))[0]}), but expected a result; is there enough memory? "
                        "finished units are kept: resume the command"
                    ) from death
                if isinstance(death, BrokenExecutor):  # it has lost every pending unit
                    executor.shutdown(wait=False)
                    executor = pool.open()
                    out = deque((each, old if _is_done(old) else executor.submit(function, each)) for each, old in out)
                else:
                    out[0] = unit, executor.submit(function, unit)
                continue
            losses = 0
            out.popleft()
            yield unit, result
    finally:
        for _, future in out:  # not every executor cancels waiting units at its shutdown
            future.cancel()
        executor.shutdown(wait=False)


def _is_done(future: Future[Any]) -> bool:
    return future.done() and not isinstance(future.exception(), BrokenExecutor)


def dispatch_timed_units_after_others(
    pool: WorkerPool,
    function: Callable[[Unit], Result],
    units: Iterable[Unit],
    measures: Callable[[Unit], bool],
) -> Iterator[tuple[Unit, Result]]:
    """As ``dispatch_in_order``; units that ``measures`` run after all others, one at a time."""
    known = [(unit, measures(unit)) for unit in units]
    yield from dispatch_in_order(pool, function, [unit for unit, timed in known if not timed])
    yield from dispatch_in_order(replace(pool, ahead=1), function, [unit for unit, timed in known if timed])


@contextmanager
def open_workers(address: str) -> Iterator[WorkerPool | None]:
    """The workers at ``address``, released at the end of the block; None for ``here``.

    Raises:
        BadArgument: an address of no known form, a package that is not installed, a scheduler out of reach, or one
            without workers.
    """
    if address == HERE:
        yield None
    elif found := PROCESSES_PATTERN.fullmatch(address):
        count, threads = int(found[1]), int(found[2] or 1)
        fresh = multiprocessing.get_context("spawn")  # no copy of a process that holds locks or a device
        engage = partial(ProcessPoolExecutor, count, mp_context=fresh, initializer=_init_worker, initargs=(threads,))
        yield WorkerPool(f"{count} processes", engage, UNITS_PER_WORKER * count)
    elif address.startswith("dask://"):
        yield from _dask_pool(address)
    elif address.startswith("slurm://"):
        yield _slurm_pool(address)
    else:
        raise BadArgument("executor", address, f"one of {EXECUTOR_FORMS}")


def _init_worker(threads: int) -> None:
    """Set the number of threads, on which sums of floats depend, and end with the parent, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group, and only the parent reports it
    import torch

    os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that this one starts
    torch.set_num_threads(threads)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process that was started by a pool"
    parent.join()
    os._exit(1)


def _dask_pool(address: str) -> Iterator[WorkerPool]:
    try:
        import distributed
    except ImportError as error:
        remedy = "pip install 'pytest-emad[cluster]'"
        raise BadArgument("executor", address, "the package distributed", remedy) from error
    try:
        place = f"tcp://{address.removeprefix('dask://')}"
        client = distributed.Client(place, timeout="10s", set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        remedy = f"{type(error).__name__}: {error}; start one with `dask scheduler`"
        raise BadArgument("executor", address, "a Dask scheduler within reach", remedy) from error
    with client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if not workers:
            raise BadArgument("executor", address, "a scheduler with workers", "start some: dask worker HOST:PORT")
        client.run(keep_freed_memory)
        threads = sum(worker["nthreads"] for worker in workers)
        # two runs of one function on one unit are separate, without a cache by arguments
        engage = partial(client.get_executor, pure=False)
        yield WorkerPool(address, engage, UNITS_PER_WORKER * threads, (BrokenExecutor, distributed.KilledWorker))


def keep_freed_memory() -> None:
    """Let this process keep freed memory, as in glibc's default, which Dask's nanny disables in its workers.

    With ``MALLOC_TRIM_THRESHOLD_`` set, glibc maps every tensor from 128 KiB on anew, and a calibration of
    ``emad-tiny`` takes twice as long. A threshold that a user has set stays.
    """
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == NANNY_TRIM_THRESHOLD and platform.libc_ver()[0] == "glibc":
        allocator = ctypes.CDLL(None)
        allocator.mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED)
        allocator.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_REUSED)
        os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)  # for processes that this one starts


def _slurm_pool(address: str) -> WorkerPool:
    try:
        import submitit
        from submitit.core.utils import UncompletedJobError
    except ImportError as error:
        raise BadArgument("executor", address, "the package submitit", "pip install 'pytest-emad[slurm]'") from error
    parts = urlsplit(address)
    folder, options = parts.netloc + parts.path, dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    jobs = options.pop("jobs", str(DEFAULT_JOBS))
    if not folder or not jobs.isdecimal() or int(jobs) < 1:
        raise BadArgument("executor", address, "slurm://FOLDER with jobs=N, N ≥ 1", "slurm:///shared/jobs?jobs=16")
    cluster = submitit.AutoExecutor(folder=folder, cluster=options.pop("cluster", None), slurm_max_num_timeout=0)
    cluster.update_parameters(**{key: int(value) if value.isdecimal() else value for key, value in options.items()})
    engage = partial(SlurmExecutor, cluster, int(jobs))
    return WorkerPool(address, engage, UNITS_PER_WORKER * int(jobs), (BrokenExecutor, UncompletedJobError))


class SlurmExecutor(ThreadPoolExecutor):
    """``jobs`` threads, each of which submits one job of ``cluster`` (a submitit executor) at a time and waits."""

    def __init__(self, cluster: Any, jobs: int):
        super().__init__(jobs)
        self._cluster, self._jobs = cluster, set[Any]()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        return super().submit(self._run, fn, args, kwargs)

    def _run(self, function: Callable[..., Result], args: Any, kwargs: Any) -> Result:
        job = self._cluster.submit(function, *args, **kwargs)
        self._jobs.add(job)
        try:
            result: Result = job.result()
        finally:
            self._jobs.discard(job)
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for job in list(self._jobs):
            job.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)
