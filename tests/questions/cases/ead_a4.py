"""Switching and gated speculation whose scores differ by a known share of the items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.claims.ead_a4 import GatedSpeculationEvidence
from tests.questions.cases.answered import covers, right
from tests.questions.simulation import Case

ACCURACY = 0.5
WAYS = ("rules", "speculative, k = 2")


def gating(lost: float, gained: float):
    def found(rng: np.random.Generator) -> GatedSpeculationEvidence:
        switched, gated = (
            column.like(column.values.astype(float)) for column in right(rng, 200, ACCURACY, lost, gained)
        )
        return GatedSpeculationEvidence("task", 0.25, switched, gated, WAYS)

    return found


def none_is_cheap_enough(rng: np.random.Generator) -> GatedSpeculationEvidence:
    return replace(gating(0.0, 0.0)(rng), gated=None)


def says(drop: float):
    def check(verdict) -> None:
        lost, switched, gated = verdict.legs
        assert lost.name == "task: score lost at a large-model share of 25.0%"
        assert lost.reason == "speculation (speculative, k = 2) for EAD (rules)"
        covers(lost, drop)
        assert switched.estimate - gated.estimate == pytest.approx(lost.estimate, abs=1e-12)

    return check


def says_none(verdict) -> None:
    assert (verdict.estimate, verdict.n) == (0.25, 200)
    assert "no gate leaves the large model as little" in verdict.reason


CASES = [
    Case("gating loses a fifth", "value", gating(0.4, 0.0), draws=20, check=says(0.2)),
    Case("gating gains a fifth", "value", gating(0.0, 0.4), draws=20, check=says(-0.2)),
    Case("no gate is cheap enough", "value", none_is_cheap_enough, check=says_none),
]
