"""Parts whose exchange gains known shares of FLOPs."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.emad_x6 import ComponentEvidence
from emad_ref.measurements.learned_exit import ComponentExchange
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case
from tests.questions.spendings import Text

GAINS = {"readout": 0.0, "monotone rule": 0.2, "criterion": 0.02}


def found(rng: np.random.Generator) -> ComponentEvidence:
    text = Text(rng, 200)
    emad = text.spent("EMAD as published", 0.01, 0.0)
    after = {part: text.spent(f"another {part}", 0.01 + gain, 0.005) for part, gain in GAINS.items()}
    return ComponentEvidence(text.measured, [ComponentExchange(part, emad, spent) for part, spent in after.items()])


def check(verdict: Verdict) -> None:
    """The largest gain first, each a difference of shares, and the row is read by it."""
    parts = [leg.name.partition(":")[0] for leg in verdict.legs]
    assert parts == ["monotone rule", "criterion", "readout"]
    for part, leg in zip(parts, verdict.legs, strict=True):
        assert leg.estimate is not None
        assert abs(leg.estimate - GAINS[part]) < 0.02
    assert verdict.estimate == verdict.legs[0].estimate
    assert "EMAD as published" in verdict.legs[0].name


CASES = [
    Case("the monotone rule fails", "value", found, draws=10, check=check),
    Case("nothing was exchanged", "premise", lambda rng: ComponentEvidence(Text(rng, 40).measured, [])),
]
