"""EMAD-E9: does uncertainty fall as the context grows, so that depth that never rises is a fair bias? (EMAD, Method)

Two legs, both within documents. The slope of the last layer's entropy over log₂ of the position, each document's own
mean removed: long easy documents would make one of their own. And what the slope is said for: of the tokens that stay
hard, how many come only after depth has fallen below what they would take (``hard_above_cap``)? A text may grow easier
on average and still ask for depth when it is gone; then the constraint is no fair bias, whatever the slope.

Beside them the depth each token would take were it free to rise, and how often any token's exceeds the cap. Depths are
replayed at the calibrated default: it does not apply to weights without quality, nor behind a decoder for which replay
does not speak. Where no token is hard, or depth hardly falls, nothing can come too late: the second leg is unmeasured,
and the row does not survive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import quality_premise
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.record import Bools, Floats
from emad_ref.statistics.legs import LegTest, combine_verdict, decide_legs, estimate_leg, leg_test, unmeasured_leg
from emad_ref.statistics.rates import mean_rate, slope_within_documents
from emad_ref.statistics.units import ByDocument, DocumentOf
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.diagnostics import depth_by_doubling, monotone_and_free_depths

HARD_LEG = "hard tokens that come after depth has fallen below what they would take"
EXERCISED = 0.05  # share of blocks that must be left out for depth to have fallen at all (METHODS: a task counts)


@dataclass(frozen=True)
class ContextDepthEvidence:
    """Per token [tokens]: log₂ of its position, entropy of the last layer in nats, depth if free, its document.

    ``above_cap`` bool [tokens]: its free depth exceeds what the monotone constraint allows.
    ``blocks_saved``: share of blocks that the monotone rule leaves out.
    """

    doublings: Floats
    entropy_nats: Floats
    free_depth: Floats
    above_cap: Bools
    document: DocumentOf
    blocks_saved: float


def decide(found: ContextDepthEvidence, asked: ClaimContext) -> Verdict:
    """Legs: the slope of entropy, and the share of hard tokens above the cap; depth and the share of all report."""
    tests, beside = [_slope(found, asked)], _beside(found, asked)
    if reason := _why_none_is_late(found, asked):
        beside.insert(0, unmeasured_leg(HARD_LEG, reason))
    else:
        tests.append(_late(found, asked))
    return combine_verdict(asked.claim, asked.model, [*decide_legs(tests, asked.other_legs), *beside])


def _slope(found: ContextDepthEvidence, asked: ClaimContext) -> LegTest:
    most = asked.claim.thresholds["slope_nats"]
    columns = found.doublings, found.entropy_nats, found.document
    slope = slope_within_documents(*columns, threshold=most, rng=asked.rng, unit=asked.claim.unit)
    return leg_test("entropy of the last layer, within documents", slope, "above", most, asked.claim.minimum)


def _why_none_is_late(found: ContextDepthEvidence, asked: ClaimContext) -> str:
    """Why no hard token could have come too late, whatever the text; empty where one could."""
    least_nats = asked.claim.thresholds["hard_nats"]
    if not (found.entropy_nats > least_nats).any():
        return f"no token is above {least_nats:g} nats at the last layer: none can come too late"
    if found.blocks_saved < EXERCISED:
        return f"depth hardly falls: {100 * found.blocks_saved:.1f} % of blocks are left out, so none can come too late"
    return ""


def _late(found: ContextDepthEvidence, asked: ClaimContext) -> LegTest:
    """Of the hard tokens of each document, those above the cap; documents without a hard token say nothing."""
    most, hard = asked.claim.thresholds["hard_above_cap"], found.entropy_nats > asked.claim.thresholds["hard_nats"]
    document = DocumentOf(found.document.number[hard])
    late = ByDocument.summed(found.above_cap[hard].astype(np.int64), document)
    all_hard = ByDocument.summed(np.ones(len(document), dtype=np.int64), document)
    share = mean_rate(late, all_hard, threshold=most, rng=asked.rng, unit="share of hard tokens")
    return leg_test(HARD_LEG, share, "above", most, asked.claim.minimum)


def _beside(found: ContextDepthEvidence, asked: ClaimContext) -> list[Leg]:
    columns = found.doublings, found.free_depth, found.document
    free = slope_within_documents(*columns, threshold=0.0, rng=asked.rng, unit="layers per doubling")
    above = ByDocument.summed(found.above_cap.astype(np.int64), found.document)
    tokens = ByDocument.summed(np.ones(len(found.document), dtype=np.int64), found.document)
    capped = mean_rate(above, tokens, threshold=0.0, rng=asked.rng, unit="share of tokens")
    return [
        estimate_leg("unconstrained exit depth, within documents", free),
        estimate_leg("share of tokens whose unconstrained depth exceeds the monotone cap", capped),
    ]


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the evaluation trace and the calibrated default; beside it depth in every doubling of the position."""
    if absent := quality_premise(evidence, asked):
        return Answer(absent, evidence.corpus, evidence.fingerprint)
    traces, trace = evidence.traces, evidence.traces.evaluation
    bound, free = monotone_and_free_depths(trace, traces.profile.point(0.0))
    found = ContextDepthEvidence(
        doublings=np.log2(trace.position + 1.0),
        entropy_nats=trace.entropy_nats[:, -1].astype(np.float64),
        free_depth=free.astype(np.float64),
        above_cap=free > bound,
        document=traces.tokens,
        blocks_saved=float(1 - bound.mean() / trace.layers),
    )
    table = AttachedTable(f"depth by position on {evidence.corpus}", by_position(evidence), "depth by position")
    return Answer(decide(found, asked), evidence.corpus, evidence.fingerprint, Attachments((table,)))


def by_position(evidence: ModelMeasurements) -> list[dict[str, Any]]:
    """What the calibrated default does along a text, and what it would do were depth free to rise again."""
    return [
        {
            "positions": f"{part.first}–{part.last}" if part.first < part.last else str(part.first),
            "tokens": part.tokens,
            "mean depth": part.depth,
            "mean free depth": part.free_depth,
            "mean entropy of the last layer, nats": part.entropy_nats,
        }
        for part in depth_by_doubling(evidence.traces.evaluation, evidence.traces.profile.point(0.0))
    ]


QUESTIONS = (Question("EMAD-E9", "model", answer, legs=lambda study, layers: 2, decide=decide),)
