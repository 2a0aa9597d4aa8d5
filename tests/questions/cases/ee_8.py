"""The formula on vocabularies and depths for which its value is plain arithmetic."""

from __future__ import annotations

from emad_ref.claims.early_exit_flops import FormulaGain, GainFormulaEvidence, gain_at
from emad_ref.statistics.verdicts import Verdict
from emad_ref.sweep.diagnostics import gain_bound, published_gain
from tests.questions.cases.ee_1 import never
from tests.questions.simulated_exits import leg_by_name
from tests.questions.simulation import Case


def gain(layers: int, vocabulary: int, minimum: int, kept: int) -> FormulaGain:
    return FormulaGain(minimum, kept, published_gain(layers, vocabulary, minimum, kept), gain_bound(layers, minimum))


def found(*gains: FormulaGain):
    return lambda rng: GainFormulaEvidence(gains, never(7.4))


def exactly_a_hundred(verdict: Verdict) -> None:
    """398·200 / (2·199 + 398) = 79,600 / 796: what is reached is supported."""
    assert (verdict.estimate, verdict.verdict) == (100.0, "survived")


def bounded(verdict: Verdict) -> None:
    """L/j of 24 layers; the surest is the farthest below."""
    bounds = [leg.estimate for leg in verdict.legs if "bound" in leg.name]
    assert bounds == [12.0, 24 / 7]
    kept = 842  # ⌊35000 / (1 + 139·7/24)⌋
    assert leg_by_name(verdict)[f"t5-large, j=7: formula at k={kept}"].outcome == "falsified"
    assert verdict.reason.endswith(f"formula at k={kept} (counted)")


CASES = [
    Case("two hundred layers, left after the first", "holds", found(gain(200, 32_128, 1, 20))),
    Case("24 layers of T5", "fails", found(gain_at(2, 24, 32_128), gain_at(7, 24, 32_128)), check=bounded),
    Case("exactly a hundred", "holds", found(gain(200, 398, 1, 2)), check=exactly_a_hundred),
]
