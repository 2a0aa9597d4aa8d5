"""Memory for weights: on pages of 2 MB where Linux gives them and a weight fills two."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a large page on x86-64 and most of Arm
LARGE = 2 * PAGE  # from where on a weight gets pages of its own: less than a third of them lies idle
_ON_LARGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone


def is_large(values: int) -> bool:
    """Whether ``values`` float32 numbers fill two large pages."""
    return values * 4 >= LARGE


def memory_for(values: int) -> Callable[[int, int], Tensor]:
    """Memory of its own for ``values`` float32 numbers, at the begin of a large page if they are many.

    As a function: (first number, how many) → a tensor over them, with a storage of its own; each keeps the memory.
    """
    held, first = _large_pages(values) if is_large(values) and _ON_LARGE_PAGES else (np.empty(values, np.float32), 0)
    return lambda at, count: torch.frombuffer(held, dtype=torch.float32, count=count, offset=first + 4 * at)


def starts_right(weight: Tensor) -> bool:
    """Whether a float32 ``weight`` lies where ``memory_for`` would begin it."""
    return _ON_LARGE_PAGES is None or not is_large(weight.numel()) or weight.data_ptr() % PAGE == 0


def _large_pages(values: int) -> tuple[Any, int]:
    """A buffer, and the byte of it where a large page begins and ``values`` numbers have room from."""
    assert _ON_LARGE_PAGES is not None
    held = mmap.mmap(-1, values * 4 + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(_ON_LARGE_PAGES)
    return held, -torch.frombuffer(held, dtype=torch.uint8, count=1).data_ptr() % PAGE
