"""Items that a large model answers at a known rate, and of which switching keeps a known share."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.ead_f1 import Found, Judged, Routed
from tests.questions.cases.answered import right
from tests.questions.simulation import Case

ACCURACY = 0.8
ENOUGH = {"llama": 0.5, "qwen": 0.7}  # saved on the judged items, more than the paper's


def kept(shares: dict[str, float], items: int = 300, lost: float = 0.02):
    """One task; ``shares``: result → Σ candidate / Σ reference in expectation, ``lost`` of it or more, some gained."""

    def found(rng: np.random.Generator) -> Found:
        routed = []
        for result, share in shares.items():
            gained = max(0.0, share - 1 + lost) * ACCURACY / (1 - ACCURACY)
            alone, switched = right(rng, items, ACCURACY, max(lost, 1 - share), gained)
            routed.append(Routed("task", result, Judged("rule", switched, alone, ENOUGH[result])))
        return Found(tuple(routed))

    return found


def nothing_chosen(rng: np.random.Generator) -> Found:
    return Found(tuple(Routed("task", result, None) for result in ENOUGH))


def says_what_it_saves(verdict) -> None:
    assert [leg.estimate for leg in verdict.legs if leg.name.endswith("saving")] == list(ENOUGH.values())


CASES = [
    Case("more than all of the score", "holds", kept({"llama": 1.05, "qwen": 1.05}), 10, check=says_what_it_saves),
    Case("a quarter is lost", "fails", kept({"llama": 0.75, "qwen": 0.75}, 100), draws=20),
    Case("lost at the larger saving only", "fails", kept({"llama": 1.05, "qwen": 0.75}), draws=10),
    Case("exactly the paper's share", "edge", kept({"llama": 0.967}, 150, lost=0.1), draws=100),
    Case("no rule saves as much", "premise", nothing_chosen),
]
