"""An int8 copy whose logits move by known amounts and whose perplexity rises at a known rate."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_e12 import Found, Rise
from emad_ref.verdict.claims import Verdict
from tests.questions.points import documents
from tests.questions.simulation import Case

TOLERANCE, POSITIONS = 1e-4, 12


def copied(rise: float = 0.002, saves: float = 0.3, moved: float = 1e-5):
    def found(rng: np.random.Generator) -> Found:
        differences = moved * (1 - 0.9 * rng.random(POSITIONS))
        differences[0] = moved
        return Found(differences, TOLERANCE, Rise("emad m=0.00", saves, *documents(rng, rise, 200)))

    return found


def by_the_invariant(verdict: Verdict) -> None:
    assert "logits under drawn depths" in verdict.reason


def on_the_invariant_alone(verdict: Verdict) -> None:
    assert [leg.outcome for leg in verdict.legs] == ["measured", "survived"]


CASES = [
    Case("logits and quality stay", "holds", copied(), draws=10),
    Case("the tolerance itself", "holds", copied(moved=TOLERANCE)),
    Case("too little saved to ask", "holds", copied(rise=0.5, saves=0.1), check=on_the_invariant_alone),
    Case("perplexity rises", "fails", copied(rise=0.03), draws=10),
    Case("a logit moves", "fails", copied(moved=2e-4), check=by_the_invariant),
    Case("perplexity rises by the threshold", "edge", copied(rise=0.01), draws=60),
]
