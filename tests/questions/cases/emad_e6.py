"""Documents that lose a known number of nats per token under a foreign profile, with and without conditioning."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_e6 import Damage, Found
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByDocument
from tests.questions.simulation import Case

FOREIGN = "world:mixed"


def damaged(plain: float, documents: int = 40, **conditioned: float):
    """Mean nats per token lost without conditioning and under each; documents differ by a tenth of a nat and more."""

    def found(rng: np.random.Generator) -> Found:
        tokens = rng.integers(100, 300, documents)
        own = plain + 0.1 * rng.standard_normal(documents)  # what a document loses anyway
        lost = {name: own + nats - plain + 0.02 * rng.standard_normal(documents) for name, nats in conditioned.items()}
        legs = [Damage(name, ByDocument.distinct(nats * tokens), 0.2) for name, nats in lost.items()]
        return Found(ByDocument.distinct(own * tokens), legs, ByDocument.distinct(tokens), FOREIGN)

    return found


def lists_what_is_saved(verdict: Verdict) -> None:
    saved = [leg for leg in verdict.legs if leg.name.endswith("foreign profile")]
    assert [leg.estimate for leg in saved] == [0.2, 0.2]


def names_what_harms(verdict: Verdict) -> None:
    (harmful,) = [leg for leg in verdict.legs if leg.outcome == "falsified"]
    assert harmful.name == f"confidence against none, profile of {FOREIGN}"
    assert abs(harmful.estimate - 0.05) < 0.02


CASES = [
    Case("both lower the damage", "holds", damaged(0.3, position=0.2, confidence=0.1), 5, check=lists_what_is_saved),
    Case("one adds to it", "fails", damaged(0.3, position=0.2, confidence=0.35), 5, check=names_what_harms),
    Case("conditioning changes nothing", "edge", damaged(0.3, position=0.3), draws=60),
    Case("a foreign profile that does no damage cannot be mended", "edge", damaged(0.0, confidence=0.0), draws=20),
]
