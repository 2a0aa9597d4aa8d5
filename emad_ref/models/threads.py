"""CPU threads of torch: one for a small model's decoding steps, all for its batches of text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
