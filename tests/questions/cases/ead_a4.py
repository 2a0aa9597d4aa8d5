"""Switching and gated speculation whose scores differ by a known share of the items."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.ead_a4 import Found, Way
from tests.questions.cases.answered import covers, right
from tests.questions.simulation import Case

ACCURACY = 0.5


def gating(lost: float, gained: float):
    def found(rng: np.random.Generator) -> Found:
        switched, gated = right(rng, 200, ACCURACY, lost, gained)
        return Found("task", Way("EAD", switched, 0.2), Way("speculative, k = 2", gated, 0.15), 0.2, 16)

    return found


def none_is_cheap_enough(rng: np.random.Generator) -> Found:
    switched, _ = right(rng, 200, ACCURACY, 0.0, 0.0)
    return Found("task", Way("EAD", switched, 0.2), None, 0.25, 16)


def says(drop: float):
    def check(verdict) -> None:
        lost, gated, switched = verdict.legs
        assert lost.name == "task: score lost by speculative, k = 2 against EAD"
        covers(lost, drop)
        assert (gated.estimate, switched.estimate) == (0.15, 0.2)

    return check


def says_none(verdict) -> None:
    assert (verdict.estimate, verdict.n) == (0.25, 16)
    assert "no gate leaves the large model as little" in verdict.reason


CASES = [
    Case("gating loses a fifth", "value", gating(0.4, 0.0), draws=20, check=says(0.2)),
    Case("gating gains a fifth", "value", gating(0.0, 0.4), draws=20, check=says(-0.2)),
    Case("no gate is cheap enough", "value", none_is_cheap_enough, check=says_none),
]
