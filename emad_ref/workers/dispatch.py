"""Dispatch units of work to the workers of Dask and take their results in the order of the units.

``open_workers(address)`` opens what ``--executor`` names:

    here                 no workers: this process does the work itself
    processes:4          four processes of this machine, one thread each; ``processes:4x2``: two threads each
    dask://HOST:PORT     the workers of a Dask scheduler

All but ``here`` need the extra ``cluster``. Results come in the order of the units, so that sums of floats do not
depend on the number of workers. Dask submits the unit of a dead worker again, and gives up after some deaths on one
unit: three on ``processes:N``, else as the scheduler's ``allowed-failures`` says. An exception of the function is
raised to the caller.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from emad_ref.errors import BadArgument, EmadError, require_extra

UNITS_PER_WORKER = 4  # submitted units per worker: one at work, others waiting behind a slow one (docs/scale.md)
HERE = "here"
EXECUTOR_FORMS = "here, processes:N, processes:NxTHREADS, dask://HOST:PORT"
PROCESSES_PATTERN = re.compile(r"processes:([1-9]\d{0,3})(?:x([1-9]\d{0,2}))?")
DEATHS_ALLOWED = 2  # of workers on one unit
LOADED_MACHINE = "10 minutes"  # to connect to a new scheduler or to replace a worker; imports may take a minute
LOCAL_SETTINGS = {
    "distributed.nanny.pre-spawn-environ": {},  # its MALLOC_TRIM_THRESHOLD_ halves the speed: keep_freed_memory
    "distributed.deploy.lost-worker-timeout": LOADED_MACHINE,  # after it a dead worker is not replaced
    "distributed.scheduler.no-workers-timeout": LOADED_MACHINE,  # without it a unit waits for a worker for ever
}
# Ctrl-C reaches the whole group: the parent alone reports it, and ends its workers. Their children do not ignore it.
IGNORE_INTERRUPT = "import signal; signal.signal(signal.SIGINT, lambda *received: None)"
NANNY_TRIM_THRESHOLD = "65536"  # Dask's default of MALLOC_TRIM_THRESHOLD_; any other value is a user's choice
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_REUSED = 32 << 20  # bytes; the most that glibc's own adjustment comes to

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class WorkersLost(EmadError):
    """Workers died several times on the same unit."""


@dataclass(frozen=True, eq=False)
class WorkerPool:
    """Workers of one kind.

    ``name``    for messages: ``processes:4``, ``dask://10.0.0.1:8786``.
    ``submit``  takes a function and its arguments and returns a future, with the methods ``result`` and ``cancel``.
    ``ahead``   units submitted at once: enough that no worker waits, few enough to hold in memory.
    ``deaths``  exceptions that mean that workers died, not that the function failed.
    """

    name: str
    submit: Callable[..., Any]
    ahead: int
    deaths: tuple[type[BaseException], ...] = ()


def dispatch_in_order(
    pool: WorkerPool, function: Callable[[Unit], Result], units: Iterable[Unit]
) -> Iterator[tuple[Unit, Result]]:
    """Each unit and its result of ``function``, in the order of ``units``. Both are pickled for workers.

    If the caller stops early, pending units are cancelled, or finished and discarded.

    Raises
    ------
    WorkersLost
        Workers died on a unit, each time that it was submitted.
    Exception
        The first, in the order of units, that ``function`` raised; a note names the unit.
    """
    source, out = enumerate(units, start=1), deque[tuple[int, Unit, Any]]()
    try:
        while True:
            for number, unit in islice(source, pool.ahead - len(out)):
                out.append((number, unit, pool.submit(function, unit)))
            if not out:
                return
            number, unit, future = out[0]
            try:
                result: Result = future.result()
            except pool.deaths as death:
                cause = f"{type(death).__name__}: {' '.join(str(death).split()).partition('. ')[0]}"
                raise WorkersLost(
                    f"{pool.name}: unit {number} got no result ({cause}); is there enough memory? finished units are "
                    "kept: resume the command"
                ) from death
            except Exception as error:
                error.add_note(f"unit {number} of {pool.name}")
                raise
            out.popleft()
            yield unit, result
    finally:
        for *_, future in out:
            future.cancel()


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

    Raises
    ------
    BadArgument
        An address of no known form, a scheduler is out of reach or has no workers.
    MissingExtra
        Dask is not installed.
    """
    local = PROCESSES_PATTERN.fullmatch(address)
    if address == HERE:
        yield None
        return
    if local is None and not address.startswith("dask://"):
        raise BadArgument("executor", address, f"one of {EXECUTOR_FORMS}")
    require_extra(f"executor={address!r}", "distributed")
    from distributed import KilledWorker
    from distributed.scheduler import NoWorkerError

    opened = _local_client(int(local[1]), int(local[2] or 1)) if local else _connected_client(address)
    with opened as (client, threads):
        # Two runs of one function on one unit are separate, without a cache by arguments. Not ``get_executor``: its
        # futures fail with a TypeError if a worker dies while its result is on the way.
        submit = partial(client.submit, pure=False)
        yield WorkerPool(address, submit, UNITS_PER_WORKER * threads, (KilledWorker, NoWorkerError, CancelledError))


@contextmanager
def _local_client(workers: int, threads: int) -> Iterator[tuple[Any, int]]:
    """Client of a new scheduler with ``workers`` processes of this machine; units that they take at a time.

    Each process takes one unit at a time, with ``threads`` threads: sums of floats depend on their number. All ports
    listen on the loopback interface alone. The processes end with this one, however that ends.
    """
    import dask
    from distributed import Client, LocalCluster

    here = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    with (
        _environment({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}),
        dask.config.set(LOCAL_SETTINGS),
        LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=workers,
            threads_per_worker=1,
            memory_limit=None,
            silence_logs=logging.ERROR,
            preload=[IGNORE_INTERRUPT],
            scheduler_kwargs={"allowed_failures": DEATHS_ALLOWED, **here},
        ) as cluster,
        Client(cluster, timeout=LOADED_MACHINE, set_as_default=False) as client,  # type: ignore[no-untyped-call]
    ):
        yield client, workers


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set ``variables`` for new processes; restore the environment at the end, which Dask's nannies change, too."""
    before = os.environ.copy()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _connected_client(address: str) -> Iterator[tuple[Any, int]]:
    """Client of the scheduler at ``address``; units that its workers take at a time."""
    from distributed import Client

    try:
        place = f"tcp://{address.removeprefix('dask://')}"
        connected = Client(place, timeout="60s", set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        remedy = f"{type(error).__name__}: {error}; start one with `dask scheduler`"
        raise BadArgument("executor", address, "a Dask scheduler within reach", remedy) from error
    with connected as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if not workers:
            raise BadArgument("executor", address, "a scheduler with workers", "start some: dask worker HOST:PORT")
        client.run(keep_freed_memory)
        yield client, sum(worker["nthreads"] for worker in workers)


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
