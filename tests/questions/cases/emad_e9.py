"""Texts whose entropy changes by a known number of nats with every doubling of the position.

Documents have levels and slopes of their own. Half of all tokens are hard; of those a known share comes too late, more
in some documents than in others: by ``icc``, the correlation within documents.
"""

from __future__ import annotations

import numpy as np

from emad_ref.claims.emad_e9 import HARD_LEG, ContextDepthEvidence
from emad_ref.statistics.units import DocumentOf
from emad_ref.statistics.verdicts import Leg, Verdict, load_register
from tests.questions.simulation import Case, celled

HARD_NATS = 6.0  # above easy tokens
LATE = 0.5  # share of hard tokens above the cap
MOST = load_register()["EMAD-E9"].thresholds["hard_above_cap"]
DEEPER = 0.5  # layers per doubling


def along(
    slope: float,
    late: float = LATE,
    documents: int = 60,
    icc: float = 0.2,
    easier: float = 0.0,
    hard: float = 0.5,
    blocks_saved: float = 0.4,
):
    """``slope`` nats per doubling within documents; ``easier``: nats fewer with every doubling of their length."""

    def found(rng: np.random.Generator) -> ContextDepthEvidence:
        lengths = 8 * 2 ** rng.integers(0, 4, documents)
        document = np.repeat(np.arange(documents), lengths)
        doublings = np.log2(1.0 + np.concatenate([np.arange(length) for length in lengths]))
        is_hard = rng.random(len(document)) < hard
        level = 0.2 * rng.standard_normal(documents) - easier * np.log2(lengths)
        slopes = slope + 0.2 * np.sqrt(icc) * rng.standard_normal(documents)
        entropy = level[document] + slopes[document] * doublings + HARD_NATS * is_hard
        entropy += 0.2 * rng.standard_normal(len(document))
        too_late = is_hard & (rng.random(len(document)) < shares(rng, late, icc, documents)[document])
        depth = 4.0 + DEEPER * doublings + rng.standard_normal(len(document))
        return ContextDepthEvidence(doublings, entropy, depth, too_late, DocumentOf(document), blocks_saved)

    return found


def shares(rng: np.random.Generator, mean: float, icc: float, documents: int) -> np.ndarray:
    """[documents] of mean ``mean``, drawn so that two tokens of one document correlate by ``icc``."""
    if icc == 0 or mean in (0, 1):
        return np.full(documents, mean)
    together = (1 - icc) / icc
    return rng.beta(mean * together, (1 - mean) * together, documents)


def cell(slope: float, late: float):
    return lambda n, icc: along(slope, late, n, icc)


def late_leg(verdict: Verdict) -> Leg:
    (leg,) = (leg for leg in verdict.legs if leg.name == HARD_LEG)
    return leg


def reports_depth_and_cap(verdict: Verdict) -> None:
    depth, cap = (leg for leg in verdict.legs if leg.outcome == "measured")
    assert abs(depth.estimate - DEEPER) < 0.1
    assert abs(cap.estimate - LATE / 2) < 0.1
    assert depth.unit == "layers per doubling"


def by_the_late_tokens(verdict: Verdict) -> None:
    assert HARD_LEG in verdict.reason
    assert verdict.unit == "share of hard tokens"


def by_the_slope(verdict: Verdict) -> None:
    assert "within documents" in verdict.reason
    assert verdict.estimate > 0


def leaves_late_tokens_open(verdict: Verdict) -> None:
    assert verdict.verdict == "unmeasured" or verdict.verdict == "inconclusive"
    assert late_leg(verdict).outcome == "unmeasured"


CASES = [
    Case("entropy falls, half of hard tokens come in time", "holds", along(-0.3), 10, 1.0, reports_depth_and_cap),
    Case("entropy rises", "fails", along(0.3), 10, 1.0, by_the_slope),
    Case(
        "entropy rises in each document, long ones are easier", "fails", along(0.3, easier=2.0), 10, 1.0, by_the_slope
    ),
    Case(
        "entropy falls, and nearly all hard tokens come too late",
        "fails",
        along(-0.3, 0.97, icc=0.05),
        10,
        1.0,
        by_the_late_tokens,
    ),
    Case("no token is hard", "tied", along(-0.3, hard=0.0), 10, 1.0, leaves_late_tokens_open),
    Case("depth never falls", "tied", along(-0.3, late=0.0, blocks_saved=0.01), 10, 1.0, leaves_late_tokens_open),
    *celled("entropy is the same everywhere", "edge", cell(0.0, 0.2)),
    *celled("three quarters of hard tokens come too late", "edge", cell(-0.5, MOST)),
    *celled("both at their thresholds", "edge", cell(0.0, MOST)),
    # thirty documents of ICC 0.3 find neither four times in five: 55 and 80 % of 500 draws
    *celled("more hard tokens come too late", "power", cell(-0.5, MOST + 0.16), n=(60, 200)),
    *celled("fewer hard tokens come too late", "power", cell(-0.5, MOST - 0.16), n=(60, 200), wanted="survived"),
]
