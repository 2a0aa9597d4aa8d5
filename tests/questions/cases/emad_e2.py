"""Logits in single precision beside the same sums in double: what rounding does, and what a missing layer does."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.emad_e2 import ForcedDepthEvidence
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case

POSITIONS, WIDTH, VOCABULARY = 40, 64, 200
TOLERANCE = 2e-4  # logits of size 8; single precision rounds their sums to about 5e-6


def decoded(missing: float = 0.0, broken: bool = False):
    """Logits of ``POSITIONS`` states; one state lacks a share of ``missing`` of what it should attend to."""

    def found(rng: np.random.Generator) -> ForcedDepthEvidence:
        states, head = rng.standard_normal((POSITIONS, WIDTH)), rng.standard_normal((WIDTH, VOCABULARY))
        seen = states.copy()
        seen[7] *= 1 - missing
        differences = np.abs((seen.astype(np.float32) @ head.astype(np.float32)) - states @ head).max(axis=1)
        if broken:
            differences[3] = np.nan
        return ForcedDepthEvidence(differences, TOLERANCE)

    return found


def says_how_many(verdict: Verdict) -> None:
    assert f"1 of {POSITIONS}" in verdict.reason


CASES = [
    Case("rounding alone", "holds", decoded(), draws=5),
    Case("the tolerance itself", "holds", lambda rng: ForcedDepthEvidence(np.array([0.0, TOLERANCE]), TOLERANCE)),
    Case("one position attends to a gap", "fails", decoded(missing=0.01), draws=5, check=says_how_many),
    Case("one position is not a number", "fails", decoded(broken=True), check=says_how_many),
    Case("nothing was compared", "premise", lambda rng: ForcedDepthEvidence(np.zeros(0), TOLERANCE)),
]
