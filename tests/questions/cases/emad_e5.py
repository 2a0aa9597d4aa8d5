"""Requests whose tokens stop at known depths: executed blocks are their sum, or some more."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_e5 import Found
from tests.questions.simulation import Case

REQUESTS, TOKENS, LAYERS = 4, 23, 12


def executed(more: int = 0):
    """Depth that only falls; ``more`` blocks run in the last request than were decided, as backfill would."""

    def found(rng: np.random.Generator) -> Found:
        depth = np.sort(rng.integers(1, LAYERS + 1, (REQUESTS, TOKENS)))[:, ::-1]
        decided = depth.sum(axis=1)
        return Found(
            decided + more * (np.arange(REQUESTS) == REQUESTS - 1), decided, np.full(REQUESTS, TOKENS * LAYERS)
        )

    return found


CASES = [
    Case("blocks are the sum of depths", "holds", executed(), draws=5),
    Case("one block more", "fails", executed(more=1), draws=5),
    Case("one block fewer", "fails", executed(more=-1), draws=5),
    Case("no request", "premise", lambda rng: Found(*(np.zeros(0, dtype=np.int64) for _ in range(3)))),
]
