"""Flatness (EMAD-E11): over the models and corpora at hand, do steeper profiles gain more? (EMAD, "Limitations")"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.measurements import ablations
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard")
def test_flatness(emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator) -> None:
    shown = ablations.ablate_flatness(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    assert len({(row["model"], row["corpus"]) for row in rows}) == len(rows)
    assert all(0 <= row["net reduction at equal quality %"] < 1 for row in rows)
