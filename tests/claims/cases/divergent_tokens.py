"""Simulated texts of which a known part of the tokens diverges, and scores of known distance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pytest_emad.claims.divergent_tokens import DivergentTokenEvidence
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.pair_items import covers, right
from tests.claims.simulation import Case

# ---------------------------------------------------------------- EAD-A6
#
# R2R's sentence is true if few tokens diverge and EAD loses score at their share; false if EAD loses none.

ITEMS, ACCURACY = 200, 0.6


def texts(
    divergent: float, lost: float, gained: float = 0.0
) -> Callable[[np.random.Generator], DivergentTokenEvidence]:
    """Return texts with this share of divergent tokens; EAD loses and gains these shares of right and wrong items."""

    def draw(rng: np.random.Generator) -> DivergentTokenEvidence:
        length, difficulty = rng.integers(10, 40, ITEMS), rng.uniform(0.5, 1.5, ITEMS)
        differing = rng.binomial(length, divergent * difficulty)
        written, switched = (
            column.with_values(column.values.astype(float)) for column in right(rng, ITEMS, ACCURACY, lost, gained)
        )
        columns = map(ByItem.from_independent_items, (differing, length))
        return DivergentTokenEvidence("task", *columns, written, switched, "rules")

    return draw


def shows(divergent: float, lost: float) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        ead, share, score = verdict.legs
        assert ead.name == f"task: score that EAD loses at a large-model share of {share.estimate:.1%}"
        assert ead.reason == "rules"
        covers(ead, lost)
        covers(share, divergent)
        assert score.estimate == pytest.approx(ACCURACY, abs=4 * (ACCURACY * (1 - ACCURACY) / ITEMS) ** 0.5)

    return check


EAD_A6 = [
    Case("few tokens diverge, EAD loses", "value", texts(0.1, lost=0.4), draws=10, check=shows(0.1, 0.4 * ACCURACY)),
    Case(
        "half diverge, EAD loses nothing",
        "value",
        texts(0.5, lost=0.2, gained=0.3),
        draws=10,
        check=shows(0.5, 0.2 * ACCURACY - 0.3 * (1 - ACCURACY)),
    ),
]

CASES = {"EAD-A6": EAD_A6}
