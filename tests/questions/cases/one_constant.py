"""Rules that differ in one constant: the share of items each loses against the value in force is known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from emad_ref.claims.constant_variation import ConstantEvidence, VariedScore
from emad_ref.statistics.units import ByItem
from tests.questions.cases.answered import covers

ACCURACY = 0.5
REFERENCE, SAVING = 4, 0.415


def loses(symbol: str, losses: Mapping[int, float], items: int = 200):
    """``losses``: value → drop of the expected score; the large model writes a share 1 / value of the tokens."""

    def found(rng: np.random.Generator) -> ConstantEvidence:
        own = rng.random(items) < ACCURACY
        varied = {}
        for value, loss in losses.items():
            change = rng.random(items) < abs(loss) / (ACCURACY if loss > 0 else 1 - ACCURACY)
            score = own & ~change if loss > 0 else own | change
            varied[value] = VariedScore(ByItem.distinct(score.astype(float)), 1 / value)
        reference = VariedScore(ByItem.distinct(own.astype(float)), 0.25)
        return ConstantEvidence("task", symbol, SAVING, REFERENCE, reference, varied)

    return found


def says(symbol: str, losses: Mapping[int, float]):
    def check(verdict) -> None:
        legs = iter(verdict.legs)
        for value, loss in losses.items():
            lost, share = next(legs), next(legs)
            assert lost.name == f"task, {symbol} = {value} for {REFERENCE}: score lost at a saving of 41.5%"
            covers(lost, loss)
            assert (share.estimate, share.interval) == (1 / value, None)
            assert share.name.endswith("at the same τ, 25.0% before")
        assert next(legs, None) is None

    return check
