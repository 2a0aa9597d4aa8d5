"""Pairs of requests whose ratio of times is known; beside them copies that cost a known number of nats."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_e7 import Copied, Found
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByDocument, ByPair
from tests.questions.simulation import Case

PAIRS = 40
COPIED_NATS = 0.2  # per token


def timed(eager: float, deferred: float, *, quality: bool = False):
    """How many times faster than full depth the exact repairs are; requests differ, a pair's noise is 5 %."""

    def found(rng: np.random.Generator) -> Found:
        full = rng.uniform(0.5, 1.5, PAIRS)

        def faster(ratio: float) -> ByPair:
            return ByPair(full / ratio * np.exp(0.05 * rng.standard_normal(PAIRS)))

        beside = {"net_reductions": {"eager backfill": 0.01}, "quality": copies(rng)} if quality else {}
        exact = {"eager backfill": faster(eager), "deferred fill": faster(deferred)}
        return Found(ByPair(full), exact, faster(1.5), **beside)

    return found


def copies(rng: np.random.Generator, documents: int = 30) -> Copied:
    tokens = rng.integers(20, 30, documents)
    exact = tokens * (2.0 + 0.3 * rng.standard_normal(documents))
    copied = exact + tokens * (COPIED_NATS + 0.02 * rng.standard_normal(documents))
    return Copied(*(ByDocument.distinct(column) for column in (copied, exact, tokens)))


def lists_copying_and_no_more(verdict: Verdict) -> None:
    """Neither FLOPs nor quality where nothing was replayed; copies are fast, and take no part."""
    listed = {leg.name: leg for leg in verdict.legs if leg.outcome == "measured"}
    assert list(listed) == ["state copying"]
    assert abs(listed["state copying"].estimate - 1.5) < 0.1


def lists_what_replay_says(verdict: Verdict) -> None:
    listed = {leg.name: leg.estimate for leg in verdict.legs if leg.outcome == "measured"}
    assert listed["eager backfill: FLOPs"] == 0.01
    assert abs(listed["state copying: perplexity"] - np.expm1(COPIED_NATS)) < 0.03


CASES = [
    Case("both repairs are slower than full depth", "holds", timed(0.9, 0.8), 5, check=lists_copying_and_no_more),
    Case("with FLOPs and copies beside", "holds", timed(0.9, 0.8, quality=True), check=lists_what_replay_says),
    Case("deferred fill is faster", "fails", timed(0.9, 1.1), draws=5),
    Case("deferred fill is exactly as fast", "edge", timed(0.8, 1.0), draws=100),
]
