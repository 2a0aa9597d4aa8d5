"""EMAD-E9: does uncertainty fall as the context grows, so that depth that never rises is a fair bias?"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.replay import depths
from emad_ref.sweep.diagnostics import above_cap, along
from emad_ref.verdict.interval import mean_rate, position_slope
from emad_ref.verdict.legs import estimated, judge_side, not_applicable
from pytest_emad.family import other_legs


@pytest.mark.emad(claim="EMAD-E9")
def test_uncertainty_falls_with_context(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    """Entropy of the last layer over log₂ of the position; beside it the depth each token would take if free."""
    evidence, claim = emad_evidence, emad_register["EMAD-E9"]
    if reason := evidence.without_quality:
        emad_record.claim(not_applicable(claim, evidence.name, reason), evidence.corpus, evidence.fingerprint)
        return
    trace, point = evidence.evaluation, evidence.profile.point(0.0, "free_eager")
    document = evidence.document_of_window[trace.sequence]
    doublings = np.log2(trace.position + 1.0)
    entropy = trace.entropy_nats[:, -1].astype(np.float64)
    free = depths(trace, point).astype(np.float64)
    capped = evidence.by_document(above_cap(trace, evidence.profile.point(0.0)) * trace.lengths)
    legs = {
        "entropy of the last layer": position_slope(
            doublings, entropy, document, threshold=0.0, rng=emad_rng, unit="nats per doubling"
        )
    }
    beside = [
        estimated(
            "unconstrained exit depth",
            position_slope(doublings, free, document, threshold=0.0, rng=emad_rng, unit="layers per doubling"),
        ),
        estimated(
            "share of tokens whose unconstrained depth exceeds the monotone cap",
            mean_rate(capped, evidence.by_document(trace.lengths), threshold=0.0, rng=emad_rng, unit="share of tokens"),
        ),
    ]
    emad_record.table(
        f"depth by position on {evidence.corpus}", evidence.name, by_position(evidence), figure="depth by position"
    )
    others = other_legs(claim.id, emad_settings, emad_register, trace.layers)
    verdict = judge_side(claim, evidence.name, legs, "above", 0.0, "documents", other_legs=others, beside=beside)
    emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def by_position(evidence):
    """What the calibrated default does along a text, and what it would do were depth free to rise again."""
    return [
        {
            "positions": f"{part.first}–{part.last}" if part.first < part.last else str(part.first),
            "tokens": part.tokens,
            "mean depth": part.depth,
            "mean free depth": part.free_depth,
            "mean entropy of the last layer, nats": part.entropy_nats,
        }
        for part in along(evidence.evaluation, evidence.profile.point(0.0))
    ]
