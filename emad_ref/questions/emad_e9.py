"""EMAD-E9: does uncertainty fall as the context grows, so that depth that never rises is a fair bias? (EMAD, Method)

Entropy of the last layer over log₂ of the position. Beside it the depth each token would take were it free to rise, and
how often that exceeds what the monotone constraint allows. Depths are replayed: it does not apply to weights without
quality, nor behind a decoder for which replay does not speak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import quality_premise
from emad_ref.record import Floats
from emad_ref.replay import depths
from emad_ref.sweep.diagnostics import above_cap, along
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.interval import mean_rate, position_slope
from emad_ref.verdict.legs import estimated, judge_side
from emad_ref.verdict.units import ByDocument, DocumentOf


@dataclass(frozen=True)
class Found:
    """Per token [tokens]: log₂ of its position, entropy of the last layer in nats, depth if free, its document.

    Per document [documents]: ``above_cap`` tokens whose free depth exceeds the monotone cap, and all ``tokens``.
    """

    doublings: Floats
    entropy_nats: Floats
    free_depth: Floats
    document: DocumentOf
    above_cap: ByDocument
    tokens: ByDocument


def decide(found: Found, asked: Asked) -> Verdict:
    """One leg: the slope of entropy; depth and the cap report."""
    threshold, rng = asked.claim.thresholds["slope_nats"], asked.rng
    entropy = position_slope(
        found.doublings, found.entropy_nats, found.document, threshold=threshold, rng=rng, unit=asked.claim.unit
    )
    free = position_slope(
        found.doublings, found.free_depth, found.document, threshold=0.0, rng=rng, unit="layers per doubling"
    )
    capped = mean_rate(found.above_cap, found.tokens, threshold=0.0, rng=rng, unit="share of tokens")
    beside = [
        estimated("unconstrained exit depth", free),
        estimated("share of tokens whose unconstrained depth exceeds the monotone cap", capped),
    ]
    legs = {"entropy of the last layer": entropy}
    return judge_side(asked.claim, asked.model, legs, "above", threshold, other_legs=asked.other_legs, beside=beside)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From the evaluation trace and the calibrated default; beside it depth in every doubling of the position."""
    if absent := quality_premise(evidence, asked):
        return Answer(absent, evidence.corpus, evidence.fingerprint)
    traces, trace = evidence.traces, evidence.traces.evaluation
    found = Found(
        doublings=np.log2(trace.position + 1.0),
        entropy_nats=trace.entropy_nats[:, -1].astype(np.float64),
        free_depth=depths(trace, traces.profile.point(0.0, "free_eager")).astype(np.float64),
        document=traces.tokens,
        above_cap=traces.by_document(above_cap(trace, traces.profile.point(0.0)) * trace.lengths),
        tokens=traces.lengths,
    )
    table = Table(f"depth by position on {evidence.corpus}", by_position(evidence), "depth by position")
    return Answer(decide(found, asked), evidence.corpus, evidence.fingerprint, Exhibits((table,)))


def by_position(evidence: Evidence) -> list[dict[str, Any]]:
    """What the calibrated default does along a text, and what it would do were depth free to rise again."""
    return [
        {
            "positions": f"{part.first}–{part.last}" if part.first < part.last else str(part.first),
            "tokens": part.tokens,
            "mean depth": part.depth,
            "mean free depth": part.free_depth,
            "mean entropy of the last layer, nats": part.entropy_nats,
        }
        for part in along(evidence.traces.evaluation, evidence.traces.profile.point(0.0))
    ]


QUESTION = Question("EMAD-E9", "model", answer, legs=lambda study, layers: 1)
