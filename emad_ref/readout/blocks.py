"""Logits read a few rows at a time, so that what is computed from them stays in a core's own cache.

    read(logits) = read(first rows) ⧺ read(next rows) ⧺ …

Every reading of ``signals`` is of one row alone, so that blocks change no bit of it: a law holds that. A pass over the
logits of 2,048 tokens and 50,000 words is a pass over 0.4 GB of memory, and an entropy is five of them; block by block
the five are nine times as fast. Knows nothing of what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CACHED_BYTES = 2**18  # of logits: with log-probabilities, probabilities and their product they fill 1 MiB


def blocks(logits: Tensor, cached: int | None = None) -> Iterator[slice]:
    """Slices of the rows of ``logits`` [n, V], in order: two rows or more, of ``cached`` bytes for each thread.

    ``cached``: None: ``CACHED_BYTES``.

    Never one row of several: a sum over a single row is split among threads, and so added up in another order. Devices
    other than CPUs take all rows at once: what costs there is another kernel.
    """
    rows, at_once = len(logits), len(logits)
    if logits.device.type == "cpu":
        held = CACHED_BYTES if cached is None else cached
        at_once = max(2, held * torch.get_num_threads() // (logits.shape[1] * logits.element_size()))
    firsts = list(range(0, max(rows - 1, 1), at_once))  # a last row by itself joins the block before it
    for first, end in zip(firsts, [*firsts[1:], rows], strict=True):
        yield slice(first, end)


def in_blocks(logits: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    """``read(logits)`` [n, …] of ``logits`` [n ≥ 1, V]."""
    return torch.cat([read(logits[rows]) for rows in blocks(logits)])
