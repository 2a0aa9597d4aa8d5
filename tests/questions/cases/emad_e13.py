"""Tied, or not: nothing else can be true."""

from __future__ import annotations

from emad_ref.claims.emad_e13 import TiedEmbeddingEvidence
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case


def speaks_of_a_premise(verdict: Verdict) -> None:
    assert "premise" in verdict.reason
    assert not verdict.gate
    assert verdict.estimate == (verdict.verdict == "survived")


CASES = [
    Case("one matrix", "holds", lambda rng: TiedEmbeddingEvidence(tied=True), check=speaks_of_a_premise),
    Case("two matrices", "fails", lambda rng: TiedEmbeddingEvidence(tied=False), check=speaks_of_a_premise),
]
