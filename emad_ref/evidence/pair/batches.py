"""Which items share a batch, and how they are decoded batch by batch.

Where cost is read off records, requests of equal length share one, so that no padding is charged to anybody; where the
score alone is asked for, any do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from emad_ref.decoding.acceptance import Speculated
from emad_ref.decoding.branching import Wanted
from emad_ref.evidence.pair.answered import record_of
from emad_ref.protocol import Prompt
from emad_ref.record import Ints, Record

ROWS = 64
Done = TypeVar("Done", Speculated, Record)


def equal(items: Sequence[Wanted]) -> list[list[int]]:
    """Indices of items in groups of equally long prompts, at most ``ROWS`` each."""
    groups: list[list[int]] = []
    for index in _ascending(items):
        last = groups[-1] if groups else []
        if last and len(items[last[0]].prompt) == len(items[index].prompt) and len(last) < ROWS:
            last.append(index)
        else:
            groups.append([index])
    return groups


def _ascending(items: Sequence[Wanted]) -> list[int]:
    return sorted(range(len(items)), key=lambda index: len(items[index].prompt))


def in_groups(
    items: Sequence[Wanted], groups: list[list[int]], decode: Callable[[list[Prompt], Wanted], Done]
) -> tuple[list[Ints], list[Done]]:
    """Emitted tokens per item, and the result of each of ``groups``; ``decode`` takes prompts, and a text of those
    wanted: all of one task stop alike."""
    results = []
    emitted: list[Ints] = [np.empty(0, dtype=np.int64)] * len(items)
    for rows in groups:
        done = decode([Prompt(items[row].prompt) for row in rows], items[rows[0]])
        results.append(done)
        for row, tokens in zip(rows, record_of(done).emitted, strict=True):
            emitted[row] = tokens
    return emitted, results
