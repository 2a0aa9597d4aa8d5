"""Requests whose tokens stop at known depths: executed blocks are their sum, or some more."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.emad_e5 import BlockCountEvidence
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case

REQUESTS, TOKENS, LAYERS = 4, 23, 12


def executed(more: int = 0, shallowest: int = 1):
    """Depth that only falls; ``more`` blocks run in the last request than were decided, as backfill would."""

    def found(rng: np.random.Generator) -> BlockCountEvidence:
        depth = np.sort(rng.integers(shallowest, LAYERS + 1, (REQUESTS, TOKENS)))[:, ::-1]
        decided = depth.sum(axis=1)
        return BlockCountEvidence(
            decided + more * (np.arange(REQUESTS) == REQUESTS - 1), decided, np.full(REQUESTS, TOKENS * LAYERS)
        )

    return found


def speaks_of_blocks(verdict: Verdict) -> None:
    executed, decided = (leg for leg in verdict.legs if leg.outcome == "measured")
    assert "executed blocks" in verdict.reason
    assert verdict.unit == "largest |difference| in blocks"
    assert 0 < executed.estimate == decided.estimate < 1
    assert executed.unit == "share of full depth's blocks"


def says_that_depth_never_fell(verdict: Verdict) -> None:
    assert "depth never fell" in verdict.reason


CASES = [
    Case("blocks are the sum of depths", "holds", executed(), draws=5, check=speaks_of_blocks),
    Case("all at full depth", "premise", executed(shallowest=LAYERS), check=says_that_depth_never_fell),
    Case("one block more at full depth", "fails", executed(more=1, shallowest=LAYERS)),
    Case("one block more", "fails", executed(more=1), draws=5),
    Case("one block fewer", "fails", executed(more=-1), draws=5),
    Case("no request", "premise", lambda rng: BlockCountEvidence(*(np.zeros(0, dtype=np.int64) for _ in range(3)))),
]
