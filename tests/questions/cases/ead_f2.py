"""Requests whose time and work stand in a known ratio between switching and speculation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from emad_ref.questions.ead_f2 import ARMS, Found
from tests.questions.cases.answered import covers, raced, right
from tests.questions.simulation import Case

LOST = 0.2


def against_speculation(time: float, work: float):
    """Speculation takes ``time`` and ``work`` times what switching does."""

    def found(rng: np.random.Generator) -> Found:
        own = dict.fromkeys(ARMS, 1.0)
        arms = raced(rng, own | {"speculative": time}, own | {"speculative": work})
        alone, switched = right(rng, 100, 1.0, LOST, 0.0)
        return Found(arms, 8, "task", "rule", switched, alone)

    return found


def uncounted(rng: np.random.Generator) -> Found:
    found = against_speculation(1.3, 1.3)(rng)
    return replace(found, arms={arm: replace(one, spent=None) for arm, one in found.arms.items()})


def names_the_score(verdict) -> None:
    assert len(verdict.legs) == 2 + len(ARMS) + 1
    covers(verdict.legs[-1], LOST)


CASES = [
    Case("faster and cheaper", "holds", against_speculation(1.3, 1.5), draws=20, check=names_the_score),
    Case("slower and dearer", "fails", against_speculation(0.8, 0.7), draws=20),
    Case("faster, but dearer", "fails", against_speculation(1.3, 0.7), draws=20),
    Case("cheaper, and as fast", "edge", against_speculation(1.0, 2.0), draws=100),
    Case("nobody counts FLOPs", "premise", uncounted),
]
