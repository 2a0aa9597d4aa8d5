"""Simulated entropies, probes and depths with known truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pytest_emad.claims.entropy_premises import (
    HARD_LEG,
    ContextDepthEvidence,
    EntropySums,
    EstimatorRankCorrelationEvidence,
    ProbeShares,
)
from pytest_emad.measurements.pareto import MarginGain
from pytest_emad.statistics.units import ByDocument, DocumentMembership
from pytest_emad.statistics.verdicts import Leg, Verdict, load_register
from tests.claims.simulation import Case, celled, clustered

# ---------------------------------------------------------------- EMAD-E1
#
# Documents of known mean entropy per layer; the windows of a document share a level.

WINDOWS = 3  # of a document
SPREAD_NATS = 0.05  # of a layer, between windows


def profile(steps: list[float], documents: int = 60, icc: float = 0.3, spread: float = SPREAD_NATS):
    """Make entropy that changes by ``steps`` nats from layer to layer."""

    def found(rng: np.random.Generator) -> EntropySums:
        tokens = rng.integers(50, 200, documents * WINDOWS)
        columns = [clustered(rng, documents, WINDOWS, icc) for _ in range(len(steps) + 1)]
        document = DocumentMembership(columns[0][1])
        means = 3.0 + np.cumsum([0.0, *steps]) + spread * np.stack([column for column, _ in columns], axis=1)
        return ByDocument.from_summed_windows(means * tokens[:, None], document), ByDocument.from_summed_windows(
            tokens, document
        )

    return found


def profile_cell(steps: list[float]):
    return lambda n, icc: profile(steps, n, icc)


def names_the_rise(verdict: Verdict) -> None:
    assert "layer 2 → 3" in verdict.reason


def asks_for_more(verdict: Verdict) -> None:
    assert verdict.verdict == "inconclusive"
    assert "at least 100 are needed to survive" in verdict.reason
    assert "% of them fail" in verdict.reason


EMAD_E1 = [
    Case("entropy falls at every layer", "holds", profile([-0.2, -0.1, -0.3], 130), draws=20),
    Case("entropy rises once", "fails", profile([-0.2, 0.1, -0.3]), draws=20, check=names_the_rise),
    Case("every layer says the same", "tied", profile([0.0, 0.0], spread=0.0)),
    *celled("one step is flat, the others fall far", "edge", profile_cell([-0.5, 0.0, -0.5])),
    *celled("all steps are flat", "edge", profile_cell([0.0] * 11)),
    *celled("a rise as small as documents can show", "power", profile_cell([-0.2, 0.04, -0.2])),
    *celled(
        "a fall as small as documents can show",
        "power",
        profile_cell([-0.2, -0.04, -0.2]),
        n=(130, 200),
        wanted="survived",
    ),
    Case("entropy falls at every layer, in few documents", "tied", profile([-0.2, -0.1, -0.3]), 5, check=asks_for_more),
]


# ---------------------------------------------------------------- EMAD-E3
#
# Shares computed from a Transformer's sizes: 24 D² FLOPs of a block, 2 D V of a full head per probe.


def probed(vocabulary: int, width: int = 1024, layers: int = 24, stride: int = 8):
    """Make full heads after every ``stride`` layers but the last, in blocks of negligible attention cost."""
    share = (layers - 1) // stride * 2 * width * vocabulary / (layers * 24 * width**2)

    return lambda rng: {"simulated": {"full": share}}


def among_others(rng: np.random.Generator) -> ProbeShares:
    return {"small": {"full": 0.73, "low-rank": 0.049}, "large": {"full": 0.02}}


def all_are_legs(verdict: Verdict) -> None:
    assert [leg.outcome for leg in verdict.legs] == ["falsified", "survived", "survived"]
    assert verdict.estimate == 0.73


EMAD_E3 = [
    Case("a small vocabulary", "holds", probed(1_000)),
    Case("a vocabulary of 50,000", "fails", probed(50_304)),
    Case(
        "a share of exactly the threshold is not below it",
        "fails",
        lambda rng: {"g": {"full": 0.05}},
    ),
    Case("one geometry and estimator is enough", "fails", among_others, check=all_are_legs),
    Case("nothing was counted", "premise", lambda rng: {}),
]


# ---------------------------------------------------------------- EMAD-E4
#
# Tokens with drawn true entropy and drawn error of each estimate: ρ follows from the two deviations.
#
# For two normal columns of correlation r the rank correlation is 6/π · asin(r/2). The entropy and error levels of a
# document have a share ``icc`` of the variance, so tokens of one document are correlated.

PROBES = (2, 4)
TOKENS = 12  # of a document


def ranked_alike(rho: Mapping[str, float], documents: int = 40, icc: float = 0.2):
    """Make estimators of rank correlation ``rho`` with full entropy."""

    def found(rng: np.random.Generator) -> EstimatorRankCorrelationEvidence:
        full = columns(rng, documents, icc)
        readings = {name: with_correlation(full, value, columns(rng, documents, icc)) for name, value in rho.items()}
        document = DocumentMembership(np.repeat(np.arange(documents), TOKENS))
        return EstimatorRankCorrelationEvidence(PROBES, full, readings, document, listed={"linear"})

    return found


def columns(rng: np.random.Generator, documents: int, icc: float) -> np.ndarray:
    """Return [tokens, probes] standard normal values, correlated by ``icc`` within a document."""
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


def ranking_cell(**rho: float):
    return lambda n, icc: ranked_alike(rho, n, icc)


EMAD_E4 = [
    Case(
        "both keep the order; a bad linear probe is not the paper's",
        "holds",
        ranked_alike({"topk": 0.99, "lowrank": 0.98, "linear": 0.5}, documents=100),
        draws=10,
        check=lists_the_linear_probe,
    ),
    Case(
        "one of two loses it", "fails", ranked_alike({"topk": 0.99, "lowrank": 0.8}), 10, 1.0, names_the_worse_estimator
    ),
    Case("every estimate is the entropy itself", "holds", ranked_alike({"topk": 1.0}, documents=100)),
    *celled("both at the threshold", "edge", ranking_cell(topk=THRESHOLD, lowrank=THRESHOLD)),
    *celled("one at the threshold, the other far above", "edge", ranking_cell(topk=THRESHOLD, lowrank=0.999)),
    *celled("one of two loses twice as much", "power", ranking_cell(topk=0.999, lowrank=TWICE)),
    *celled("both lose half as much", "power", ranking_cell(topk=HALF, lowrank=HALF), n=(100, 200), wanted="survived"),
]


# ---------------------------------------------------------------- EMAD-E9
#
# Texts whose entropy changes by a known number of nats with each doubling of the position.
#
# Documents have their own levels and slopes. Half of all tokens are hard; a known share of them comes after the cap,
# more in some documents than in others: ``icc`` is the correlation within documents.

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
    """Make ``slope`` nats per doubling within documents; ``easier``: nats less with each doubling of their length."""

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
        return ContextDepthEvidence(doublings, entropy, depth, too_late, DocumentMembership(document), blocks_saved)

    return found


def shares(rng: np.random.Generator, mean: float, icc: float, documents: int) -> np.ndarray:
    """Return shares [documents] of mean ``mean``; two tokens of one document correlate by ``icc``."""
    if icc == 0 or mean in (0, 1):
        return np.full(documents, mean)
    together = (1 - icc) / icc
    return rng.beta(mean * together, (1 - mean) * together, documents)


def context_cell(slope: float, late: float):
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


EMAD_E9 = [
    Case(
        "entropy falls, half of hard tokens come in time",
        "holds",
        along(-0.3, documents=250),
        10,
        1.0,
        reports_depth_and_cap,
    ),
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
    *celled("entropy is the same everywhere", "edge", context_cell(0.0, 0.2), n=(80, 200)),
    *celled("three quarters of hard tokens come too late", "edge", context_cell(-0.5, MOST), n=(80, 200)),
    *celled("both at their thresholds", "edge", context_cell(0.0, MOST), n=(80, 200)),
    # 30 documents of ICC 0.3 have too little power: the outcomes come in 55 and 80 % of 500 draws
    *celled("more hard tokens come too late", "power", context_cell(-0.5, MOST + 0.16), n=(60, 200)),
    *celled(
        "fewer hard tokens come too late", "power", context_cell(-0.5, MOST - 0.16), n=(250, 400), wanted="survived"
    ),
]


# ---------------------------------------------------------------- EMAD-E11
#
# Documents with a known slope of entropy over layers: steep or flat, falling or rising.

DOCUMENTS, LAYERS = 60, 6
GAINED = ("emad m=0.20", 0.25, 0.004)
NOTHING = ("no margin", 0.0, 0.0)


def sloped(slope: float, gain: MarginGain = GAINED):
    """Make ``slope`` nats per layer, with a deviation of 0.05 nats between documents."""

    def found(rng: np.random.Generator) -> tuple[EntropySums, MarginGain]:
        tokens = rng.integers(50, 200, DOCUMENTS)
        means = 3.0 + slope * np.arange(LAYERS) + 0.05 * rng.standard_normal((DOCUMENTS, LAYERS))
        return (ByDocument.from_whole_documents(means * tokens[:, None]), ByDocument.from_whole_documents(tokens)), gain

    return found


def reports(slope: float, gain: MarginGain = GAINED) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        gained, lost, steep = verdict.legs
        point, saved, rise = gain
        assert gained.name == f"net reduction at equal quality ({point}, chosen on validation)"
        assert (gained.estimate, gained.n, gained.interval) == (saved, DOCUMENTS, None)
        assert (lost.estimate, lost.unit, lost.interval) == (rise, "relative rise", None)
        assert abs(steep.estimate - slope) < 0.02
        assert steep.interval[0] < steep.estimate < steep.interval[1]

    return check


EMAD_E11 = [
    Case("a steep profile", "value", sloped(-0.4), draws=5, check=reports(-0.4)),
    Case("a profile that rises", "value", sloped(0.2), draws=5, check=reports(0.2)),
    Case("a flat one that gains nothing", "value", sloped(0.0, NOTHING), draws=5, check=reports(0.0, NOTHING)),
]


# ---------------------------------------------------------------- EMAD-E13
#
# Tied or untied are the only two truths.


def speaks_of_a_premise(verdict: Verdict) -> None:
    assert "premise" in verdict.reason
    assert verdict.estimate == (verdict.verdict == "survived")


EMAD_E13 = [
    Case("one matrix", "holds", lambda rng: True, check=speaks_of_a_premise),
    Case("two matrices", "fails", lambda rng: False, check=speaks_of_a_premise),
]


CASES = {
    "EMAD-E1": EMAD_E1,
    "EMAD-E3": EMAD_E3,
    "EMAD-E4": EMAD_E4,
    "EMAD-E9": EMAD_E9,
    "EMAD-E11": EMAD_E11,
    "EMAD-E13": EMAD_E13,
}
