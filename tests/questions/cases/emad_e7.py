"""Pairs of requests whose ratio of times is known; beside them copies that cost a known number of nats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from emad_ref.claims.emad_e7 import BackfillEvidence, CopyingQuality
from emad_ref.statistics.units import ByDocument, ByPair
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case, celled

PAIRS, NOISE = 40, 0.05
COPIED_NATS = 0.2  # per token


def timed(eager: float, deferred: float, *, quality: bool = False, skipped: float = 0.4, pairs: int = PAIRS):
    """How many times faster than full depth the exact repairs are; requests differ, a pair's noise is 5 %."""

    def found(rng: np.random.Generator) -> BackfillEvidence:
        request = rng.uniform(0.5, 1.5, pairs)

        def faster(ratio: float) -> ByPair:
            return ByPair(request / ratio * np.exp(NOISE * rng.standard_normal(pairs)))

        beside = {"net_reductions": {"eager backfill": 0.01}, "quality": copies(rng)} if quality else {}
        exact = {"eager backfill": faster(eager), "deferred fill": faster(deferred)}
        return BackfillEvidence(faster(1.0), exact, faster(1.5), faster(1.4), skipped, **beside)

    return found


def the_same_arm(pairs: int, icc: float):
    """Both repairs are full depth under another name."""

    def found(rng: np.random.Generator) -> BackfillEvidence:
        made = timed(1.0, 1.0, pairs=pairs)(rng)
        return replace(made, exact=dict.fromkeys(made.exact, made.full))

    return found


def copies(rng: np.random.Generator, documents: int = 30) -> CopyingQuality:
    tokens = rng.integers(20, 30, documents)
    exact = tokens * (2.0 + 0.3 * rng.standard_normal(documents))
    copied = exact + tokens * (COPIED_NATS + 0.02 * rng.standard_normal(documents))
    return CopyingQuality(*(ByDocument.distinct(column) for column in (copied, exact, tokens)))


def lists_copying_and_no_more(verdict: Verdict) -> None:
    """Neither FLOPs nor quality where nothing was replayed; copies are fast, and take no part."""
    listed = {leg.name: leg for leg in verdict.legs if leg.outcome == "measured"}
    assert list(listed) == ["state copying", "monotone", "blocks left out"]
    assert abs(listed["state copying"].estimate - 1.5) < 0.1
    assert abs(listed["monotone"].estimate - 1.4) < 0.1
    assert listed["blocks left out"].estimate == 0.4


def lists_what_replay_says(verdict: Verdict) -> None:
    listed = {leg.name: leg.estimate for leg in verdict.legs if leg.outcome == "measured"}
    assert listed["eager backfill: FLOPs"] == 0.01
    assert abs(listed["state copying: perplexity"] - np.expm1(COPIED_NATS)) < 0.03


def says_that_nothing_is_owed(verdict: Verdict) -> None:
    assert "leaves out 1.0 % of blocks" in verdict.reason
    assert {leg.outcome for leg in verdict.legs} == {"measured"}
    assert {"eager backfill", "deferred fill"} < {leg.name for leg in verdict.legs}


CASES = [
    Case("both repairs are slower than full depth", "holds", timed(0.9, 0.8), 5, check=lists_copying_and_no_more),
    Case("with FLOPs and copies beside", "holds", timed(0.9, 0.8, quality=True), check=lists_what_replay_says),
    Case("deferred fill is faster", "fails", timed(0.9, 1.1), draws=5),
    *celled("deferred fill is exactly as fast", "edge", lambda n, _: timed(0.8, 1.0, pairs=n), icc=(0.0,), draws=20),
    *celled("deferred fill is a tenth faster", "power", lambda n, _: timed(0.8, 1.1, pairs=n), icc=(0.0,)),
    *celled("both are a tenth slower", "power", lambda n, _: timed(0.9, 0.9, pairs=n), icc=(0.0,), wanted="survived"),
    *celled("both are full depth itself", "tied", the_same_arm, icc=(0.0,)),
    Case("a rule that hardly fires", "premise", timed(0.9, 0.8, skipped=0.01), check=says_that_nothing_is_owed),
]
