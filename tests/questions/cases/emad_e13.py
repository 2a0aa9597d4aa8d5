"""Tied, or not: nothing else can be true."""

from __future__ import annotations

from emad_ref.questions.emad_e13 import Found
from emad_ref.verdict.claims import Verdict
from tests.questions.simulation import Case


def speaks_of_a_premise(verdict: Verdict) -> None:
    assert "premise" in verdict.reason
    assert not verdict.gate
    assert verdict.estimate == (verdict.verdict == "survived")


CASES = [
    Case("one matrix", "holds", lambda rng: Found(tied=True), check=speaks_of_a_premise),
    Case("two matrices", "fails", lambda rng: Found(tied=False), check=speaks_of_a_premise),
]
