"""Calibration corpus: what does a profile of corpus A do on corpus B? (EMAD, "Calibration stability")"""

from __future__ import annotations

from itertools import pairwise

import pytest

from pytest_emad.ablated import Table, not_applicable, points

MARGINS = (0.0, 0.2)  # nats; a margin is one of the paper's remedies for a shift


@pytest.mark.emad(budget="standard")
def test_calibration_corpus(emad_evidence, emad_record, emad_rng):
    """Every profile on every corpus at hand; on its own corpus a profile is the reference for the others."""
    evidence = emad_evidence
    if reason := not_applicable(evidence):
        pytest.skip(reason)
    if evidence.shifted is None:
        pytest.skip(f"not applicable (no second corpus beside {evidence.corpus})")
    at_hand, rows = (evidence, evidence.shifted), []
    profiles = {other.corpus: other.calibrated() for other in at_hand}
    for judged in at_hand:
        table = Table(judged, emad_rng)
        rows.append(table.full(text=judged.corpus, profile="none"))
        assert (rows[-1]["rise %"], rows[-1]["net reduction %"]) == (0.0, 0.0)
        for corpus, profile in profiles.items():
            by_margin = table.rows(points(profile, MARGINS), text=judged.corpus, profile=corpus)
            assert all(less["mean depth"] <= more["mean depth"] for less, more in pairwise(by_margin))
            rows += by_margin
    emad_record.table("ablation, calibration corpus", evidence.name, rows)
    assert {(row["text"], row["profile"]) for row in rows} >= {(a, b) for a in profiles for b in profiles}
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
