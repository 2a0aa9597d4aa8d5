"""Where workers are, in one word of a command line.

    here                 no workers: this process does the work itself
    processes:4          four processes of this machine, one thread each; ``processes:4x2``: two threads each
    dask://HOST:PORT     the workers of a Dask scheduler (extra ``cluster``)
    slurm://FOLDER       jobs of Slurm, four at once by default, ``slurm://FOLDER?jobs=16&slurm_partition=gpu``: every
                         other key is submitit's; logs and pickles go to FOLDER, which all machines see

A process starts anew and imports what it needs: no copy of a process that holds locks or a device. The number of
threads is said and not guessed, because sums of floats depend on it, and results shall not depend on the machine that
a run was started from. It ends with the process that started it: nobody works on for a run that was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Thread
from urllib.parse import parse_qsl, urlsplit

from emad_ref.errors import BadArgument
from emad_ref.workers.apart import Apart
from emad_ref.workers.handing import EACH, Crew

HERE = "here"
FORMS = "here, processes:N, processes:NxTHREADS, dask://HOST:PORT, slurm://FOLDER"
PROCESSES = re.compile(r"processes:([1-9]\d{0,3})(?:x([1-9]\d{0,2}))?")
JOBS = 4


@contextmanager
def workers_at(address: str) -> Iterator[Crew | None]:
    """The crew at ``address``, let go at the end of the block; None for ``here``.

    Raises:
        BadArgument: an address of no known form, a package that is not installed, a scheduler out of reach, or one
            without workers.
    """
    if address == HERE:
        yield None
    elif found := PROCESSES.fullmatch(address):
        yield _processes(int(found[1]), int(found[2] or 1))
    elif address.startswith("dask://"):
        with _dask(address) as crew:
            yield crew
    elif address.startswith("slurm://"):
        yield _slurm(address)
    else:
        raise BadArgument("executor", address, f"one of {FORMS}")


def _processes(count: int, threads: int) -> Crew:
    def engage() -> Executor:
        fresh = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=fresh, initializer=partial(_settle, threads))

    alone = _processes(1, threads) if count > 1 else None
    return Crew(f"{count} processes", partial(Apart, [engage] * count), EACH * count, alone=alone)


def _settle(threads: int) -> None:
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


def _dask(address: str) -> AbstractContextManager[Crew]:
    try:
        from emad_ref.workers.dask import workers_of
    except ImportError as error:
        remedy = "pip install 'pytest-emad[cluster]'"
        raise BadArgument("executor", address, "the package distributed", remedy) from error
    return workers_of(address)


def _slurm(address: str) -> Crew:
    try:
        from emad_ref.workers.slurm import JobLost, Jobs
    except ImportError as error:
        raise BadArgument("executor", address, "the package submitit", "pip install 'pytest-emad[slurm]'") from error
    parts = urlsplit(address)
    folder, options = parts.netloc + parts.path, dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    jobs = options.pop("jobs", str(JOBS))
    if not folder or not jobs.isdecimal() or int(jobs) < 1:
        raise BadArgument("executor", address, "slurm://FOLDER with jobs=N, N ≥ 1", "slurm:///shared/jobs?jobs=16")
    crew = partial(Crew, address, deaths=(BrokenExecutor, JobLost))
    alone = crew(engage=partial(Jobs, folder, options, exclusive=True), ahead=EACH * int(jobs))
    if options.get("cluster") == "local":  # jobs are processes of this machine
        alone = crew(engage=partial(Jobs, folder, options), ahead=1)
    return crew(engage=partial(Jobs, folder, options), ahead=EACH * int(jobs), alone=alone)
