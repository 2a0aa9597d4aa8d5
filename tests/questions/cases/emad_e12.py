"""An int8 copy whose logits move by known amounts and whose perplexity rises at a known rate, window by window."""

from __future__ import annotations

import math

import numpy as np

from emad_ref.claims.emad_e12 import QuantisationEvidence, QuantisedRise
from emad_ref.statistics.units import ByDocument, DocumentOf
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case, celled, clustered

TOLERANCE, POSITIONS = 1e-4, 12
WINDOWS, SPREAD_NATS = 3, 0.008  # of a document; per token, between windows
ENOUGH = 800  # documents that let a rise of half the threshold survive


def copied(rise: float = 0.002, saves: float = 0.3, moved: float = 1e-5, documents: int = ENOUGH, icc: float = 0.3):
    def found(rng: np.random.Generator) -> QuantisationEvidence:
        differences = moved * (1 - 0.9 * rng.random(POSITIONS))
        differences[0] = moved
        tokens = rng.integers(100, 300, documents * WINDOWS)
        deviation, cluster = clustered(rng, documents, WINDOWS, icc)
        full = tokens * rng.uniform(1.0, 3.0, len(tokens))
        lost = full + tokens * (math.log1p(rise) + SPREAD_NATS * deviation)
        columns = (ByDocument.summed(column, DocumentOf(cluster)) for column in (lost, full, tokens))
        return QuantisationEvidence(differences, TOLERANCE, QuantisedRise("emad m=0.00", saves, *columns))

    return found


def cell(rise: float):
    return lambda n, icc: copied(rise, documents=n, icc=icc)


def by_the_invariant(verdict: Verdict) -> None:
    assert "logits under drawn depths" in verdict.reason


def not_on_the_invariant_alone(verdict: Verdict) -> None:
    assert "no point saves 15 %" in verdict.reason
    assert [leg.outcome for leg in verdict.legs] == ["measured", "survived"]


def names_what_is_needed(verdict: Verdict) -> None:
    assert "documents would decide it" in verdict.reason
    assert 30 <= verdict.n <= 36


CASES = [
    Case("logits and quality stay", "holds", copied(), draws=10),
    Case("the tolerance itself", "holds", copied(moved=TOLERANCE)),
    Case("quality stays, in few documents", "tied", copied(documents=36), 10, 1.0, names_what_is_needed),
    Case("too little saved to ask", "premise", copied(rise=0.5, saves=0.1), check=not_on_the_invariant_alone),
    Case("too little saved, and a logit moves", "fails", copied(saves=0.1, moved=2e-4), check=by_the_invariant),
    Case("perplexity rises", "fails", copied(rise=0.03, documents=36), draws=10),
    Case("a logit moves", "fails", copied(moved=2e-4), check=by_the_invariant),
    *celled("perplexity rises by the threshold", "edge", cell(0.01)),
    *celled("perplexity rises by twice the threshold", "power", cell(0.02), n=(40, 60, 200)),
    *celled("perplexity rises by half the threshold", "power", cell(0.005), n=(ENOUGH,), wanted="survived"),
]
