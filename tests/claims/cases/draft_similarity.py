"""Simulated states whose cosine tells, or does not tell, whether a draft is kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.stats import spearmanr

from pytest_emad.claims.draft_similarity import DraftSimilarityEvidence
from pytest_emad.statistics.units import DocumentMembership
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.pair_items import covers
from tests.claims.simulated_exits import leg_by_name
from tests.claims.simulation import Case, says

# ---------------------------------------------------------------- EMAD-X8
#
# KnapSpec's sentence is true if a larger cosine means a kept draft. It is false if only depth raises both, or nothing.

DOCUMENTS, TOKENS, LAYERS = 40, 30, 3
Draw = Callable[[np.random.Generator], DraftSimilarityEvidence]


def states(within: float, by_layer: float, documents: int = DOCUMENTS) -> Draw:
    """Return drafts whose acceptance follows the cosine ``within`` a layer, and both the depth, ``by_layer``."""

    def draw(rng: np.random.Generator) -> DraftSimilarityEvidence:
        depth = by_layer * np.arange(LAYERS)
        difficulty = rng.normal(0, 1, (documents * TOKENS, LAYERS))
        cosine = np.tanh((difficulty + depth) / 4)
        luck = rng.normal(0, 1, difficulty.shape)
        kept = within * difficulty + depth + luck > by_layer
        return DraftSimilarityEvidence(cosine, kept, DocumentMembership(np.repeat(np.arange(documents), TOKENS)))

    return draw


def correlates(within: float, by_layer: float) -> Callable[[Verdict], None]:
    """The truth is SciPy's ρ of a sample of 200,000 tokens of the same law."""
    large = states(within, by_layer, documents=200_000 // TOKENS)(np.random.default_rng(1))
    pooled = spearmanr(large.cosine.ravel(), large.kept.ravel()).statistic
    second = spearmanr(large.cosine[:, 1], large.kept[:, 1]).statistic

    def check(verdict: Verdict) -> None:
        legs = leg_by_name(verdict)
        covers(legs[f"layers 1–{LAYERS}"], pooled)
        covers(legs["layer 2"], second)

    return check


def all_kept(rng: np.random.Generator) -> DraftSimilarityEvidence:
    found = states(1.0, 1.0)(rng)
    return DraftSimilarityEvidence(found.cosine, np.ones_like(found.kept), found.document)


EMAD_X8 = [
    Case("cosine tells within each layer", "value", states(2.0, 1.0), draws=5, check=correlates(2.0, 1.0)),
    Case("only depth raises both", "value", states(0.0, 1.0), draws=5, check=correlates(0.0, 1.0)),
    Case("cosine tells nothing", "value", states(0.0, 0.0), draws=5, check=correlates(0.0, 0.0)),
    Case("every draft is kept", "premise", all_kept, check=says("every draft is kept")),
    Case("two documents", "premise", states(1.0, 1.0, documents=2), check=says("fewer than 3 documents")),
]

CASES = {"EMAD-X8": EMAD_X8}
