"""Tokens whose true entropy, and the error of each estimate of it, are drawn: ρ follows from the two deviations.

Of two normal columns with correlation r the rank correlation is 6/π · asin(r/2). Documents have levels of their own, so
tokens of one document depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from emad_ref.questions.emad_e4 import Found, Reading
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import DocumentOf
from tests.questions.simulation import Case

PROBES = (2, 4)
TOKENS = 12  # of a document


def ranked_alike(rho: Mapping[str, float], documents: int = 40):
    """Estimators whose rank correlation with full entropy is ``rho``."""

    def found(rng: np.random.Generator) -> Found:
        levels = np.repeat(rng.standard_normal((documents, len(PROBES))), TOKENS, axis=0)
        full = np.sqrt(0.2) * levels + np.sqrt(0.8) * rng.standard_normal(levels.shape)
        readings = [
            Reading(name, _with_correlation(full, value, rng), listed=name == "linear") for name, value in rho.items()
        ]
        return Found(PROBES, full, readings, DocumentOf(np.repeat(np.arange(documents), TOKENS)))

    return found


def _with_correlation(full: np.ndarray, rho: float, rng: np.random.Generator) -> np.ndarray:
    r = 2 * np.sin(np.pi * rho / 6)
    return r * full + np.sqrt(1 - r * r) * rng.standard_normal(full.shape)


def lists_the_linear_probe(verdict: Verdict) -> None:
    listed = [leg for leg in verdict.legs if leg.name.startswith("linear")]
    assert [leg.outcome for leg in listed] == ["measured"] * len(PROBES)
    assert all(abs(leg.estimate - 0.5) < 0.15 for leg in listed)


def names_the_worse_estimator(verdict: Verdict) -> None:
    (first,) = {leg.name.partition(",")[0] for leg in verdict.legs if leg.outcome == "falsified"}
    assert first == "lowrank"
    assert "lowrank" in verdict.reason


CASES = [
    Case(
        "both keep the order; a bad linear probe is not the paper's",
        "holds",
        ranked_alike({"topk": 0.99, "lowrank": 0.98, "linear": 0.5}),
        draws=2,
        check=lists_the_linear_probe,
    ),
    Case(
        "one of two loses it", "fails", ranked_alike({"topk": 0.99, "lowrank": 0.8}), 2, 1.0, names_the_worse_estimator
    ),
    Case("one estimator at the threshold", "edge", ranked_alike({"topk": 0.95}, documents=30), draws=12),
]
