"""Where workers are, in one word of a command line.

    here                 no workers: this process does the work itself
    processes:4          four processes of this machine, one thread each; ``processes:4x2``: two threads each
    dask://HOST:PORT     the workers of a Dask scheduler (extra ``cluster``)
    slurm://FOLDER       jobs of Slurm, four at once by default, ``slurm://FOLDER?jobs=16&slurm_partition=gpu``: every
                         other key is submitit's; logs and pickles go to FOLDER, which all machines see

A process starts anew and imports what it needs: no copy of a process that holds locks or a device. The number of
threads is said and not guessed, because sums of floats depend on it, and results shall not depend on the machine that
a run was started from.
"""

from __future__ import annotations

import multiprocessing
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from urllib.parse import parse_qsl, urlsplit

from emad_ref.errors import BadArgument
from emad_ref.workers.handing import Crew

HERE = "here"
FORMS = "here, processes:N, processes:NxTHREADS, dask://HOST:PORT, slurm://FOLDER"
PROCESSES = re.compile(r"processes:([1-9]\d{0,3})(?:x([1-9]\d{0,2}))?")
EACH = 4  # units out per worker: one at work, others waiting behind one that takes long (docs/scale.md)
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
        return ProcessPoolExecutor(count, mp_context=fresh, initializer=partial(_settle, threads))

    crowded = f"{count} processes share this machine" if count > 1 else ""
    return Crew(f"{count} processes", engage, EACH * count, crowded=crowded)


def _settle(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


@contextmanager
def _dask(address: str) -> Iterator[Crew]:
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        remedy = "pip install 'pytest-emad[cluster]'"
        raise BadArgument("executor", address, "the package distributed", remedy) from error
    try:
        place = f"tcp://{address.removeprefix('dask://')}"
        client = Client(place, timeout="10s", set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        remedy = f"{type(error).__name__}: {error}; start one with `dask scheduler`"
        raise BadArgument("executor", address, "a Dask scheduler within reach", remedy) from error
    with client:
        hosts = Counter(worker["host"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())
        if not hosts:
            raise BadArgument("executor", address, "a scheduler with workers", "start some: dask worker HOST:PORT")
        (host, most), count = hosts.most_common(1)[0], hosts.total()
        crowded = f"{most} workers share {host}" if most > 1 else ""
        # two runs of one function on one unit are two runs: nothing is looked up by what it is called with
        engage = partial(client.get_executor, pure=False)
        yield Crew(address, engage, EACH * count, (BrokenExecutor, KilledWorker), crowded)


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
    return Crew(address, partial(Jobs, folder, options), EACH * int(jobs), (BrokenExecutor, JobLost))
