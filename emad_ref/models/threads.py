"""CPU threads: torch takes one for a small model's decoding steps, all for its batches; a step's BLAS takes one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

SINGLE_THREADED = 50_000_000  # parameters; kernels of a smaller model's steps take microseconds
BATCH = 2048  # tokens: a second thread halves the time of such a batch even for a model of 3 million parameters

_threads_before: list[int] = []  # thread numbers before ``one_thread_for_steps``, outermost first


@contextmanager
def one_thread_for_steps(parameters: int) -> Iterator[None]:
    """Run a model of fewer than ``SINGLE_THREADED`` parameters on one thread inside the block.

    A second thread for kernels of microseconds made a run three times as long. A set OMP_NUM_THREADS is kept.
    """
    threads = torch.get_num_threads()
    if parameters >= SINGLE_THREADED or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    torch.set_num_threads(1)
    _threads_before.append(threads)
    try:
        yield
    finally:
        _threads_before.pop()
        torch.set_num_threads(threads)


@contextmanager
def all_threads_for_batches(tokens: int) -> Iterator[None]:
    """Restore the threads before ``one_thread_for_steps`` inside a block that reads ``tokens`` in batches."""
    threads = torch.get_num_threads()
    if not _threads_before or tokens < BATCH:
        yield
        return
    torch.set_num_threads(_threads_before[0])
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _BlasLimit:
    """Context that runs products of NumPy's BLAS on one thread; outside, NumPy keeps its threads.

    The threads of OpenBLAS and those of torch spin while they wait, each on the other's cores. On two cores beside
    other processes, a product of 0.2 ms between two operations of torch took 20 to 70 ms with both pools. An object,
    because a generator's context takes as long as a small product.
    """

    __slots__ = ("_before", "_inside", "_lock")

    def __init__(self) -> None:
        self._before, self._inside, self._lock = list[int](), 0, Lock()

    def __enter__(self) -> None:
        pools = _blas_pools()
        with self._lock:
            if not self._inside:
                self._before = [pool.get_num_threads() for pool in pools]
                _set_threads(pools, self._before, [1] * len(pools))
            self._inside += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _set_threads(_blas_pools(), [1] * len(self._before), self._before)


def _set_threads(pools: list[Any], now: list[int], wanted: list[int]) -> None:
    for pool, before, after in zip(pools, now, wanted, strict=True):
        if before != after:
            pool.set_num_threads(after)


@cache
def _blas_pools() -> list[Any]:
    """The BLAS libraries of this process, loaded by NumPy and SciPy, with an adjustable number of threads."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


one_blas_thread = _BlasLimit()  # of all threads of this process
