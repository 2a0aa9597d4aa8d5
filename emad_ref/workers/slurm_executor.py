"""Jobs of Slurm as a ``concurrent.futures.Executor``, by submitit: one job a unit, waited for by polling.

submitit's jobs are no futures; here stands as much of a future as ``handing`` asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import submitit
from submitit.core.utils import UncompletedJobError

POLLED_SECONDS = 1.0  # submitit asks Slurm itself at most every few seconds
R = TypeVar("R")


class JobLost(Exception):
    """A job that ended without a result: killed, out of memory, out of time."""


class SlurmFuture(Future[R]):
    """A submitit job as a future."""

    def __init__(self, job: submitit.Job[R]):
        super().__init__()
        self._job = job

    def done(self) -> bool:
        return self._job.done()

    def cancel(self) -> bool:
        """Asks Slurm to; whether it does in time is not known."""
        self._job.cancel()
        return False

    def result(self, timeout: float | None = None) -> R:
        """Raises JobLost, or what the function raised; TimeoutError after ``timeout`` seconds, None: never."""
        failure = self.exception(timeout)
        if failure is not None:
            raise failure
        return self._job.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        ends = None if timeout is None else time.monotonic() + timeout
        while not self._job.done():
            if ends is not None and time.monotonic() > ends:
                raise TimeoutError(f"job {self._job.job_id} is not done after {timeout:g} s")
            time.sleep(POLLED_SECONDS)
        try:
            found = self._job.exception()
        except UncompletedJobError as error:  # submitit raises it or returns it, by how the job ended
            found = error
        return JobLost(str(found).strip().splitlines()[0]) if isinstance(found, UncompletedJobError) else found


class SlurmExecutor(Executor):
    """Submits to the cluster at hand. ``folder``: of logs and pickles, seen by all machines.

    ``options``: submitit's parameters as texts (``slurm_partition``, ``timeout_min``, …); ``cluster=local`` runs jobs
    as processes of this machine. A job that is lost is handed out again by whoever waits, not requeued by submitit.
    ``exclusive``: no job of anybody's shares the machine of one of these.
    """

    def __init__(self, folder: str, options: Mapping[str, str], exclusive: bool = False):
        given: dict[str, Any] = {key: int(value) if value.isdecimal() else value for key, value in options.items()}
        given |= {"slurm_exclusive": True} if exclusive else {}
        cluster = given.pop("cluster", None)
        self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=0)
        self._executor.update_parameters(**given)
        self.options = given

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        return SlurmFuture(self._executor.submit(fn, *args, **kwargs))
