"""Rank correlation of tokens, clustered by document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Floats, Ints
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.rates import mean_rate
from emad_ref.verdict.units import ByDocument, DocumentOf

MOST_RHO = 1 - 1e-12  # beyond it Fisher's scale ends


def rank_correlation(
    a: Floats, b: Floats, document: DocumentOf, *, threshold: float, rng: np.random.Generator
) -> Estimate:
    """Spearman's ρ of ``a`` and ``b`` [tokens], by the jackknife over ``document`` [tokens] on Fisher's scale.

    Every document is left out once and the rest ranked anew; the pseudo-values of atanh ρ, one per document, are an
    ordinary sample (Arvesen 1969), to which ``mean_rate`` is applied. At a ρ of 0.95 and 30 documents of 12 tokens a
    5 % bound errs 4.5 % and 5.5 % of the time at most (1,200 simulations, levels of documents or none); a percentile
    bootstrap's interval missed 9 % at 40 documents. The interval lies about the jackknife's estimate, which is less
    biased than ρ itself. A ρ of ±1 has no spread: see ``mean_rate`` for columns all alike.

    Raises:
        BadArgument: fewer than three documents, a column without spread, or a threshold beyond ±1.
    """
    dense = [np.unique(column, return_inverse=True)[1] for column in (a, b)]
    place = document.place
    documents = int(place.max()) + 1
    if documents < 3:
        raise BadArgument("document", documents, "at least three documents", "two have no spread to speak of")
    if not -1 < threshold < 1:
        raise BadArgument("threshold", threshold, "a correlation between -1 and 1")
    if not all(column.max() > 0 for column in dense):
        raise BadArgument("a, b", "a constant column", "values that differ", "nothing can be ranked")
    value = _weighted_spearman(dense, np.ones(len(place)))
    without = np.array([_weighted_spearman(dense, (place != left_out).astype(float)) for left_out in range(documents)])
    if np.isnan(without).any():
        said = "one document holds all the spread there is"
        return Estimate(value, -1.0, 1.0, documents, 1.0, 1.0, "Spearman ρ", said, ByDocument.noun)
    whole, parts = (
        np.arctanh(np.clip([value], -MOST_RHO, MOST_RHO))[0],
        np.arctanh(np.clip(without, -MOST_RHO, MOST_RHO)),
    )
    pseudo = ByDocument(documents * whole - (documents - 1) * parts, np.unique(document.number))
    ones = pseudo.like(np.ones(documents))
    found = mean_rate(pseudo, ones, threshold=math.atanh(threshold), rng=rng, unit="Spearman ρ")
    low, high = (math.tanh(bound) for bound in (found.low, found.high))
    return replace(
        found, value=value, low=low, high=high, method=f"jackknife over {documents} documents; {found.method}"
    )


def _weighted_spearman(dense: Sequence[Ints], weight: Floats) -> float:
    """ρ of two columns of dense ranks, each token counted ``weight`` times; NaN where a column has no spread."""
    centred = []
    for column in dense:
        mass = np.bincount(column, weights=weight)
        middle = (np.cumsum(mass) - mass / 2)[column]
        centred.append(middle - np.average(middle, weights=weight))
    x, y = centred
    spread = math.sqrt(float(weight @ (x * x)) * float(weight @ (y * y)))
    return float(weight @ (x * y)) / spread if spread > 0 else math.nan
