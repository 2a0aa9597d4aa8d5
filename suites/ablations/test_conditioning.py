"""Conditioning: do thresholds per bin of one or two features of a token serve better? (EMAD, "Ablations")"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.measurements import ablations
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard")
def test_conditioning(emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator) -> None:
    shown = ablations.ablate_conditioning(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    assert (rows[0]["rise %"], rows[0]["net reduction %"]) == (0.0, 0.0)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    assert all(row["fallen back"] <= row["bins"] for row in rows)
    for features in {row["features"] for row in rows}:
        depths = [row["mean depth"] for row in rows if row["features"] == features]
        assert depths == sorted(depths), "a larger margin lowers thresholds: deeper"
