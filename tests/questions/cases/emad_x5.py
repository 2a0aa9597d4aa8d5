"""Oracles that save known shares of blocks."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.emad_x5 import OracleCeiling, OracleEvidence
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case
from tests.questions.spendings import Text


def found(rng: np.random.Generator) -> OracleEvidence:
    text = Text(rng, 200)
    truths = {"tuned lens, free depth": (0.48, 0.01), "raw lens, depth that only falls": (0.0, 0.0)}
    return OracleEvidence(
        text.measured, [OracleCeiling(0.01, text.spent(name, *truth)) for name, truth in truths.items()]
    )


def check(verdict: Verdict) -> None:
    free, falling = verdict.legs
    assert verdict.estimate == free.estimate
    for leg, truth in ((free, 0.48), (falling, 0.0)):
        assert leg.interval is not None
        assert leg.estimate is not None
        assert abs(leg.estimate - truth) < 0.02
        assert leg.interval[0] < leg.estimate < leg.interval[1]
    assert free.name == "tuned lens, free depth, at 1 %"
    assert "perplexity rises by 1.0" in free.reason or "perplexity rises by 0.9" in free.reason


CASES = [
    Case("what two oracles save", "value", found, draws=10, check=check),
    Case("no oracle", "premise", lambda rng: OracleEvidence(Text(rng, 40).measured, [])),
]
