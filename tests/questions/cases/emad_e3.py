"""Shares from a Transformer's sizes: 24 D² FLOPs of a block against 2 D V of a full head per probe."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.emad_e3 import ProbeCostEvidence
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case


def probed(vocabulary: int, width: int = 1024, layers: int = 24, stride: int = 8):
    """Full heads after every ``stride`` layers but the last, in blocks whose attention costs nothing beside."""
    share = (layers - 1) // stride * 2 * width * vocabulary / (layers * 24 * width**2)

    def found(rng: np.random.Generator) -> ProbeCostEvidence:
        return ProbeCostEvidence({"simulated": {"full": share}})

    return found


def among_others(rng: np.random.Generator) -> ProbeCostEvidence:
    return ProbeCostEvidence({"small": {"full": 0.73, "low-rank": 0.049}, "large": {"full": 0.02}})


def all_are_legs(verdict: Verdict) -> None:
    assert [leg.outcome for leg in verdict.legs] == ["falsified", "survived", "survived"]
    assert verdict.estimate == 0.73


CASES = [
    Case("a small vocabulary", "holds", probed(1_000)),
    Case("a vocabulary of 50,000", "fails", probed(50_304)),
    Case(
        "a share of exactly the threshold is not below it",
        "fails",
        lambda rng: ProbeCostEvidence({"g": {"full": 0.05}}),
    ),
    Case("one geometry and estimator is enough", "fails", among_others, check=all_are_legs),
    Case("nothing was counted", "premise", lambda rng: ProbeCostEvidence({})),
]
