"""Simulated documents with non-normal distributions: long-tailed rises, a few ruined documents, very unequal lengths.

Rises are drawn with mean 1 and scaled, so that the token-weighted rise of the corpus is the requested one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from emad_ref.calibration.windows import LONGEST_WINDOW, MOST_WINDOWS
from pytest_emad.measurements.operating_points import NllPair
from pytest_emad.statistics.units import ByDocument, DocumentMembership

Draw = Callable[[np.random.Generator, int], np.ndarray]
FULL_NATS = 2.0  # per token at full depth
POPULATION = 200_000  # documents from which the rise of a whole corpus is computed where it depends on lengths


def log_normal(sigma: float) -> Draw:
    return lambda rng, n: np.exp(sigma * rng.standard_normal(n) - sigma**2 / 2)


def ruined(share: float) -> Draw:
    """All documents share a tenth of the rise; a few have the rest."""
    return lambda rng, n: 0.1 + 0.4 * rng.standard_normal(n) + 0.9 / share * (rng.random(n) < share)


RISES: dict[str, Draw] = {
    "normal": lambda rng, n: 1 + 0.4 * rng.standard_normal(n),
    "log-normal 1.2": log_normal(1.2),
    "log-normal 1.6": log_normal(1.6),
    "log-normal 2": log_normal(2.0),
    "gamma 0.3": lambda rng, n: rng.gamma(0.3, 1 / 0.3, n),
    "Pareto 1.5": lambda rng, n: (rng.pareto(1.5, n) + 1) / 3,
    "gains log-normal 1.2": lambda rng, n: 2 - log_normal(1.2)(rng, n),
    "1 % ruined": ruined(0.01),
    "2 % ruined": ruined(0.02),
}


def cut(tokens: np.ndarray) -> np.ndarray:
    """Return the number of tokens read from documents of these lengths."""
    return np.clip(tokens, 1, MOST_WINDOWS * LONGEST_WINDOW).astype(np.int64)


LENGTHS: dict[str, Draw] = {
    "one window": lambda rng, n: np.full(n, LONGEST_WINDOW),
    "unequal": lambda rng, n: rng.integers(100, 300, n),
    "log-normal": lambda rng, n: cut(300 * log_normal(1.4)(rng, n)),
}


def one_dominates(rng: np.random.Generator, n: int) -> np.ndarray:
    """One document has 60 % of all tokens, as text of lm-eval that is not cut into windows."""
    tokens = rng.integers(100, 300, n)
    tokens[0] = int(1.5 * tokens[1:].sum())
    return tokens


@cache
def _mean_by_length(lengths: str, rises: str) -> float:
    rng = np.random.default_rng(0)
    tokens = LENGTHS[lengths](rng, POPULATION)
    rise = RISES[rises](rng, POPULATION) * tokens
    return float((tokens * rise).sum() / tokens.sum())


AUTHOR = 10  # documents in a row by one author


def by_authors(rng: np.random.Generator, rise: float, count: int, marked: bool = False) -> NllPair:
    """Make documents of which each ten in a row, by one author, share half of the spread of their rises.

    ``marked``: documents come with their author, and so each author as one document.
    """
    tokens = LENGTHS["unequal"](rng, count)
    author = np.arange(count) // AUTHOR
    each = log_normal(0.5)(rng, author[-1] + 1)[author] * log_normal(0.5)(rng, count)
    arms = _arms(tokens, each * math.log1p(rise))
    if not marked:
        return arms
    lost, full, read = (ByDocument.from_summed_windows(arm.values, DocumentMembership(author)) for arm in arms)
    return lost, full, read


def documents(
    rng: np.random.Generator, rise: float, count: int, rises: str, lengths: str, longer_lose_more: bool = False
) -> NllPair:
    """Make ``count`` documents with perplexity rise ``rise``; a document's rise may grow with its length."""
    tokens = one_dominates(rng, count) if lengths == "one dominates" else LENGTHS[lengths](rng, count)
    each = RISES[rises](rng, count)
    if longer_lose_more:
        each = each * tokens / _mean_by_length(lengths, rises)
    return _arms(tokens, each * math.log1p(rise))


def _arms(tokens: np.ndarray, nats_per_token: np.ndarray) -> NllPair:
    full = FULL_NATS * tokens
    lost = full + tokens * nats_per_token
    return (
        ByDocument.from_whole_documents(lost),
        ByDocument.from_whole_documents(full),
        ByDocument.from_whole_documents(tokens),
    )
