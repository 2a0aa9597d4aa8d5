"""Calibration corpus: what does a profile of corpus A do on corpus B? (EMAD, "Calibration stability")"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.measurements import ablations
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard")
def test_calibration_corpus(
    emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator
) -> None:
    shown = ablations.ablate_calibration_corpus(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    corpora = {row["text"] for row in rows}
    assert len(corpora) == 2
    assert {(row["text"], row["profile"]) for row in rows} == {(a, b) for a in corpora for b in {*corpora, "none"}}
    full = [row for row in rows if row["profile"] == "none"]
    assert all((row["rise %"], row["net reduction %"]) == (0.0, 0.0) for row in full)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    for text in corpora:
        for profile in corpora:
            depths = [row["mean depth"] for row in rows if (row["text"], row["profile"]) == (text, profile)]
            assert depths == sorted(depths), "a larger margin lowers thresholds: deeper"
