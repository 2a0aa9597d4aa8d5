"""Executors side by side as one, each with one unit at a time: what befalls one of them befalls its unit alone.

A pool of processes does not outlive any of its own: where one is killed the others are ended, and with them every unit
that was at work. Pools of one process each lose what the killed one had. So with machines: of several workers on a
host one unit at a time is at work, whichever of them has it, and measures what it would on a machine of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")
Engage = Callable[[], Executor]


class Apart(Executor):
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
