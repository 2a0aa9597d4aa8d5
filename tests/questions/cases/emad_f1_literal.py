"""Sweeps of margins: the larger the margin, the less is saved and lost. One bad point among many is enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.questions.quality import Found
from emad_ref.verdict.claims import Verdict
from tests.questions.points import point
from tests.questions.simulation import Case


def sweep(rises: Sequence[float]):
    """Points that save between 50 % and 10 %, the last of them too little to be judged."""

    def found(rng: np.random.Generator) -> Found:
        saved = np.linspace(0.5, 0.1, len(rises))
        named = enumerate(zip(rises, saved, strict=True))
        return Found([point(rng, f"m{i}", rise, saves=saves, answered=800) for i, (rise, saves) in named])

    return found


def lists_the_worst(verdict: Verdict) -> None:
    assert len(verdict.legs) == 20
    assert verdict.legs[0].name == "m0: perplexity on world"
    assert "worst 20 of" in verdict.reason


CASES = [
    Case("quality holds at every point", "holds", sweep([0.002, 0.001, 0.0, 0.3]), draws=10),
    Case("quality is lost at one point", "fails", sweep([0.04, 0.001, *[0.0] * 7]), draws=8, check=lists_the_worst),
    Case("one point loses what the threshold allows", "edge", sweep([0.01, 0.0, 0.3]), draws=60),
    Case("no point saves enough", "premise", lambda rng: Found([point(rng, saves=0.1), point(rng, saves=-0.2)])),
]
