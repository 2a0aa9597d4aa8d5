"""Workers of a Dask scheduler, and memory that they keep from one tensor to the next.

A worker under Dask's nanny starts with ``MALLOC_TRIM_THRESHOLD_`` set, so that it gives memory back early. glibc then
no longer learns which sizes come again: each tensor from 128 KiB on is mapped, zeroed by the kernel and unmapped, and
a calibration of ``emad-tiny`` takes twice as long. Such a worker is set back to what a process comes to by itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import distributed

from emad_ref.errors import BadArgument
from emad_ref.workers.dispatch import UNITS_PER_WORKER, ExclusiveExecutor, WorkerPool

THRESHOLD = "MALLOC_TRIM_THRESHOLD_"
NANNYS = "65536"  # the default of distributed.nanny.pre-spawn-environ; any other value is somebody's choice
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_LEARNT = 32 << 20  # bytes; from there on glibc maps what it is asked for, whatever came before
FREE_AT_THE_TOP = 2 * LARGEST_LEARNT  # what glibc pairs with it
R = TypeVar("R")


class MemoryKeepingExecutor(Executor):
    """``executor`` of Dask, whose workers are set back before their first unit, also those that come later."""

    def __init__(self, executor: Executor):
        self._executor = executor

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        return self._executor.submit(_run_keeping_memory, fn, *args, **kwargs)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:  # Dask's own takes less than others do
        self._executor.shutdown(*args, **kwargs)


def _run_keeping_memory(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    keep_memory()
    return function(*args, **kwargs)


def keep_memory() -> None:
    """Of glibc alone, and where the nanny's threshold stands; this process's, and that of processes it starts."""
    if os.environ.get(THRESHOLD) != NANNYS or platform.libc_ver()[0] != "glibc":
        return
    allocator = ctypes.CDLL(None)
    allocator.mallopt(M_MMAP_THRESHOLD, LARGEST_LEARNT)
    allocator.mallopt(M_TRIM_THRESHOLD, FREE_AT_THE_TOP)
    os.environ.pop(THRESHOLD, None)  # another thread of this worker may have been here


@contextmanager
def open_dask_workers(address: str) -> Iterator[WorkerPool]:
    """The crew of the scheduler at ``address``, ``dask://HOST:PORT``.

    Raises:
        BadArgument: a scheduler out of reach, or one without workers.
    """
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
        hosts = Counter[str]()
        for worker in workers:
            hosts[worker["host"]] += worker["nthreads"]  # units at once

        def engage(**where: list[str]) -> Executor:
            # two runs of one function on one unit are two runs: nothing is looked up by what it is called with
            return MemoryKeepingExecutor(client.get_executor(pure=False, **where))  # type: ignore[no-untyped-call]

        crew = partial(WorkerPool, address, deaths=(BrokenExecutor, distributed.KilledWorker))
        one_each = partial(ExclusiveExecutor, [partial(engage, workers=[host]) for host in hosts])
        alone = crew(engage=one_each, ahead=UNITS_PER_WORKER * len(hosts)) if max(hosts.values()) > 1 else None
        yield crew(engage=engage, ahead=UNITS_PER_WORKER * hosts.total(), alone=alone)
