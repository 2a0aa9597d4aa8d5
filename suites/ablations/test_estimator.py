"""Entropy estimator: what do cheaper readings of entropy save, and what do they lose? (EMAD, "Ablations")"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.measurements import ablations
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard", measures=True)
def test_entropy_estimator(
    emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator
) -> None:
    shown = ablations.ablate_estimator(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    assert all(row["probe FLOPs per token"] >= 0 for row in rows)
    linear = next(row for row in rows if row["estimator"] == "linear")
    dear = next(row for row in rows if row["estimator"].startswith("topk"))
    assert linear["probe FLOPs per token"] < dear["probe FLOPs per token"]
