"""Probe stride: how much do more or fewer probes save, and what do they lose? (EMAD, "Ablations")"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.measurements import ablations
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard")
def test_probe_stride(emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator) -> None:
    shown = ablations.ablate_stride(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    assert (rows[0]["rise %"], rows[0]["net reduction %"]) == (0.0, 0.0)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    assert all(row["mean depth"] >= int(row["layers"].split(",")[0]) for row in rows[1:])
