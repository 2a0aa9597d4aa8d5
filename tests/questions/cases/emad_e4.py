"""Tokens whose true entropy, and the error of each estimate of it, are drawn: ρ follows from the two deviations.

Of two normal columns with correlation r the rank correlation is 6/π · asin(r/2). Documents have levels of their own, of
entropy and of error, with a share ``icc`` of the variance: tokens of one document then depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from emad_ref.claims.emad_e4 import EstimatorRankingEvidence, EstimatorReading
from emad_ref.statistics.units import DocumentOf
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case, celled, clustered

PROBES = (2, 4)
TOKENS = 12  # of a document


def ranked_alike(rho: Mapping[str, float], documents: int = 40, icc: float = 0.2):
    """Estimators whose rank correlation with full entropy is ``rho``."""

    def found(rng: np.random.Generator) -> EstimatorRankingEvidence:
        full = columns(rng, documents, icc)
        readings = [
            EstimatorReading(name, with_correlation(full, value, columns(rng, documents, icc)), listed=name == "linear")
            for name, value in rho.items()
        ]
        return EstimatorRankingEvidence(PROBES, full, readings, DocumentOf(np.repeat(np.arange(documents), TOKENS)))

    return found


def columns(rng: np.random.Generator, documents: int, icc: float) -> np.ndarray:
    """[tokens, probes] standard normal, with correlation ``icc`` within a document."""
    return np.stack([clustered(rng, documents, TOKENS, icc)[0] for _ in PROBES], axis=1)


def with_correlation(full: np.ndarray, rho: float, error: np.ndarray) -> np.ndarray:
    r = 2 * np.sin(np.pi * rho / 6)
    return r * full + np.sqrt(1 - r * r) * error


def lists_the_linear_probe(verdict: Verdict) -> None:
    listed = [leg for leg in verdict.legs if leg.name.startswith("linear")]
    assert [leg.outcome for leg in listed] == ["measured"] * len(PROBES)
    assert all(abs(leg.estimate - 0.5) < 0.15 for leg in listed)


def names_the_worse_estimator(verdict: Verdict) -> None:
    (first,) = {leg.name.partition(",")[0] for leg in verdict.legs if leg.outcome == "falsified"}
    assert first == "lowrank"
    assert "lowrank" in verdict.reason


THRESHOLD = 0.95
TWICE, HALF = (1 - share * (1 - THRESHOLD) for share in (2, 0.5))  # of the disorder that the threshold allows


def cell(**rho: float):
    return lambda n, icc: ranked_alike(rho, n, icc)


CASES = [
    Case(
        "both keep the order; a bad linear probe is not the paper's",
        "holds",
        ranked_alike({"topk": 0.99, "lowrank": 0.98, "linear": 0.5}),
        draws=10,
        check=lists_the_linear_probe,
    ),
    Case(
        "one of two loses it", "fails", ranked_alike({"topk": 0.99, "lowrank": 0.8}), 10, 1.0, names_the_worse_estimator
    ),
    Case("every estimate is the entropy itself", "holds", ranked_alike({"topk": 1.0}, documents=30)),
    *celled("both at the threshold", "edge", cell(topk=THRESHOLD, lowrank=THRESHOLD)),
    *celled("one at the threshold, the other far above", "edge", cell(topk=THRESHOLD, lowrank=0.999)),
    *celled("one of two loses twice as much", "power", cell(topk=0.999, lowrank=TWICE)),
    *celled("both lose half as much", "power", cell(topk=HALF, lowrank=HALF), wanted="survived"),
]
