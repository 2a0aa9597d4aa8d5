"""Speculation with and without EMAD whose times stand in a known ratio."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.claims.emad_e8 import NONE, ComposedSpeculationEvidence
from tests.questions.cases.answered import covers, raced
from tests.questions.simulation import Case

VERIFIER, BOTH = "EMAD in the verifier", "EMAD in draft and verifier"
ACCEPTED = {NONE: 0.8, VERIFIER: 0.7, BOTH: 0.6}


def as_fast(verifier: float, both: float):
    """How many times faster each is than speculation without EMAD."""

    def found(rng: np.random.Generator) -> ComposedSpeculationEvidence:
        return ComposedSpeculationEvidence(
            raced(rng, {NONE: 1.0, VERIFIER: 1 / verifier, BOTH: 1 / both}, {}, ACCEPTED), 8, 4
        )

    return found


def says(verifier: float, both: float):
    def check(verdict) -> None:
        legs = {leg.name: leg for leg in verdict.legs}
        covers(legs[f"{VERIFIER}: speed against none"], verifier)
        covers(legs[f"{BOTH}: speed against none"], both)
        assert legs[f"{NONE}: speed against none"].estimate == 1.0
        assert verdict.legs[0].name.startswith(BOTH), "adaptive depth first: the row quotes it"
        for name, rate in ACCEPTED.items():
            assert legs[f"{name}: acceptance"].estimate == pytest.approx(rate, abs=0.04)  # 40 runs, each within 0.1
            assert legs[f"{name}: rows whose output is the verifier's own"].estimate == 4

    return check


CASES = [
    Case("EMAD helps, most in both", "value", as_fast(1.2, 1.5), draws=5, check=says(1.2, 1.5)),
    Case("EMAD in the draft hurts", "value", as_fast(1.1, 0.8), draws=5, check=says(1.1, 0.8)),
]
