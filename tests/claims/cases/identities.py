"""Simulated logits and block counts that agree or differ by construction."""

from __future__ import annotations

import math

import numpy as np

from emad_ref.point import full_depth
from pytest_emad.claims.identities import BlockCounts, Int8AdaptiveDepthEvidence, LogitDifferences
from pytest_emad.statistics.units import ByDocument, DocumentMembership
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.simulation import Case, celled, clustered

# ---------------------------------------------------------------- EMAD-E2
#
# Logits in single precision against the same sums in double: the effect of rounding, and of a missing layer.

POSITIONS, WIDTH, VOCABULARY = 40, 64, 200
TOLERANCE = 2e-4  # logits of size 8; single precision rounds their sums to about 5e-6


def decoded(missing: float = 0.0, broken: bool = False):
    """Return logits of ``POSITIONS`` states; one state lacks a share ``missing`` of its attention input."""

    def found(rng: np.random.Generator) -> LogitDifferences:
        states, head = rng.standard_normal((POSITIONS, WIDTH)), rng.standard_normal((WIDTH, VOCABULARY))
        seen = states.copy()
        seen[7] *= 1 - missing
        differences = np.abs((seen.astype(np.float32) @ head.astype(np.float32)) - states @ head).max(axis=1)
        if broken:
            differences[3] = np.nan
        return differences, TOLERANCE

    return found


def says_how_many(verdict: Verdict) -> None:
    assert f"1 of {POSITIONS}" in verdict.reason


EMAD_E2 = [
    Case("rounding alone", "holds", decoded(), draws=5),
    Case("the tolerance itself", "holds", lambda rng: (np.array([0.0, TOLERANCE]), TOLERANCE)),
    Case("one position attends to a gap", "fails", decoded(missing=0.01), draws=5, check=says_how_many),
    Case("one position is not a number", "fails", decoded(broken=True), check=says_how_many),
    Case("nothing was compared", "premise", lambda rng: (np.zeros(0), TOLERANCE)),
]


# ---------------------------------------------------------------- EMAD-E5
#
# Requests with tokens of known depths: executed blocks equal their sum, or exceed it.

REQUESTS, TOKENS, LAYERS = 4, 23, 12


def executed(more: int = 0, shallowest: int = 1):
    """Make depth that only falls; in the last request ``more`` blocks run than were decided, as backfill would."""

    def found(rng: np.random.Generator) -> BlockCounts:
        depth = np.sort(rng.integers(shallowest, LAYERS + 1, (REQUESTS, TOKENS)))[:, ::-1]
        decided = depth.sum(axis=1)
        ran = decided + more * (np.arange(REQUESTS) == REQUESTS - 1)
        return ran, decided, np.full(REQUESTS, TOKENS * LAYERS)

    return found


def speaks_of_blocks(verdict: Verdict) -> None:
    executed, decided = (leg for leg in verdict.legs if leg.outcome == "measured")
    assert "executed blocks" in verdict.reason
    assert verdict.unit == "largest |difference| in blocks"
    assert 0 < executed.estimate == decided.estimate < 1
    assert executed.unit == "share of full depth's blocks"


def says_that_depth_never_fell(verdict: Verdict) -> None:
    assert "depth never fell" in verdict.reason


EMAD_E5 = [
    Case("blocks are the sum of depths", "holds", executed(), draws=5, check=speaks_of_blocks),
    Case("all at full depth", "premise", executed(shallowest=LAYERS), check=says_that_depth_never_fell),
    Case("one block more at full depth", "fails", executed(more=1, shallowest=LAYERS)),
    Case("one block more", "fails", executed(more=1), draws=5),
    Case("one block fewer", "fails", executed(more=-1), draws=5),
    Case("no request", "premise", lambda rng: (np.zeros(0, dtype=np.int64),) * 3),
]


# ---------------------------------------------------------------- EMAD-E12
#
# An int8 copy with a known shift of logits and a known rate of perplexity rise, window by window.

INT8_TOLERANCE, INT8_POSITIONS = 1e-4, 12
WINDOWS, SPREAD_NATS = 3, 0.008  # of a document; per token, between windows
ENOUGH = 800  # number of documents at which a rise of half the threshold survives


def copied(rise: float = 0.002, saves: float = 0.3, moved: float = 1e-5, documents: int = ENOUGH, icc: float = 0.3):
    def found(rng: np.random.Generator) -> Int8AdaptiveDepthEvidence:
        differences = moved * (1 - 0.9 * rng.random(INT8_POSITIONS))
        differences[0] = moved
        tokens = rng.integers(100, 300, documents * WINDOWS)
        deviation, cluster = clustered(rng, documents, WINDOWS, icc)
        full = tokens * rng.uniform(1.0, 3.0, len(tokens))
        lost = full + tokens * (math.log1p(rise) + SPREAD_NATS * deviation)
        sums = tuple(
            ByDocument.from_summed_windows(column, DocumentMembership(cluster)) for column in (lost, full, tokens)
        )
        return Int8AdaptiveDepthEvidence((differences, INT8_TOLERANCE), full_depth(4), saves, sums)

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


EMAD_E12 = [
    Case("logits and quality stay", "holds", copied(), draws=10),
    Case("the tolerance itself", "holds", copied(moved=INT8_TOLERANCE)),
    Case("quality stays, in few documents", "tied", copied(documents=36), 10, 1.0, names_what_is_needed),
    Case("too little saved to ask", "premise", copied(rise=0.5, saves=0.1), check=not_on_the_invariant_alone),
    Case("too little saved, and a logit moves", "fails", copied(saves=0.1, moved=2e-4), check=by_the_invariant),
    Case("perplexity rises", "fails", copied(rise=0.03, documents=36), draws=10),
    Case("a logit moves", "fails", copied(moved=2e-4), check=by_the_invariant),
    *celled("perplexity rises by the threshold", "edge", cell(0.01)),
    *celled("perplexity rises by twice the threshold", "power", cell(0.02), n=(40, 60, 200)),
    *celled("perplexity rises by half the threshold", "power", cell(0.005), n=(ENOUGH,), wanted="survived"),
]


CASES = {
    "EMAD-E2": EMAD_E2,
    "EMAD-E5": EMAD_E5,
    "EMAD-E12": EMAD_E12,
}
