"""Sweeps of margins: the larger the margin, the less is saved and lost. One bad point among many is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emad_ref.claims.quality import QualityEvidence
from emad_ref.statistics.verdicts import Verdict
from tests.questions.points import point
from tests.questions.simulation import Case


def sweep(rises: Sequence[float], **options: Any):
    """Points that save between 50 % and 10 %, the last of them too little to be judged."""

    def found(rng: np.random.Generator) -> QualityEvidence:
        saved = np.linspace(0.5, 0.1, len(rises))
        named = enumerate(zip(rises, saved, strict=True))
        return QualityEvidence(
            [point(rng, f"m{i}", rise, saves=saves, answered=800, **options) for i, (rise, saves) in named]
        )

    return found


def lists_the_worst(verdict: Verdict) -> None:
    assert len(verdict.legs) == 20
    assert verdict.legs[0].name == "m0: perplexity on world"
    assert "worst 20 of" in verdict.reason
    assert "worst task that counts: " in verdict.reason


def never_survives(verdict: Verdict) -> None:
    assert verdict.verdict == "inconclusive", verdict.reason
    assert "worst task that counts: inventory loses 9" in verdict.reason


ALONE = {"lost": {"inventory": 0.97}, "solved": 0.98, "idle": {"facts": 0.0, "recall": 0.0}}

CASES = [
    Case("quality holds at every point", "holds", sweep([0.002, 0.001, 0.0, 0.3]), draws=10),
    Case("quality is lost at one point", "fails", sweep([0.04, 0.001, *[0.0] * 7]), draws=8, check=lists_the_worst),
    Case("two tasks are lost at every point", "fails", sweep([0.0, 0.0], lost={"a": 0.06, "b": 0.06}), draws=8),
    Case("one point loses what the threshold allows", "edge", sweep([0.01, 0.0, 0.3]), draws=20),
    Case(
        "every point loses one task, and acts on no other", "tied", sweep([0.0, 0.0], **ALONE), 8, check=never_survives
    ),
    Case(
        "no point saves enough", "premise", lambda rng: QualityEvidence([point(rng, saves=0.1), point(rng, saves=-0.2)])
    ),
]
