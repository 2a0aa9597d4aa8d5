"""Conditioning: do thresholds per bin of one or two features of a token serve better? (EMAD, "Ablations")"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from emad_ref.point import FEATURES
from pytest_emad.ablated import Table, fallback_note, margins, not_applicable, points

CONDITIONINGS = [features for count in (0, 1, 2) for features in combinations(FEATURES, count)]


@pytest.mark.emad(budget="standard")
def test_conditioning(emad_evidence, emad_record, emad_rng):
    evidence = emad_evidence
    if reason := not_applicable(evidence):
        pytest.skip(reason)
    table = Table(evidence, emad_rng)
    rows = [table.full(features="–", bins=0, **{"fallen back": 0})]
    for features in CONDITIONINGS:
        profile = evidence.calibrated(features=features)
        fallen, few = np.array(profile.fallbacks, dtype=int) > 0, profile.statistics.tokens < profile.minimum_tokens
        beside = {"features": profile.bins.name, "bins": profile.bins.count, "fallen back": int(fallen.sum())}
        by_margin = table.rows(points(profile, margins(evidence)), **beside)
        rows += by_margin
        if note := fallback_note(profile):
            emad_record.note(f"{evidence.name}: {note}")
        assert profile.statistics.tokens.sum() == len(evidence.calibration), "a calibration token is in no bin"
        assert not features or (fallen == few).all(), "a bin seen too rarely keeps its own thresholds, or another fell"
        assert all(less["mean depth"] <= more["mean depth"] for less, more in pairwise(by_margin))
        assert all(len(point.thresholds) == profile.bins.count for point in points(profile, [0.0]))
    emad_record.table(f"ablation, conditioning on {evidence.corpus}", evidence.name, rows)

    assert (rows[0]["rise %"], rows[0]["net reduction %"]) == (0.0, 0.0)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
