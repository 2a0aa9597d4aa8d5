"""Margin m: the curve of quality against what is saved. (EMAD, "Ablations": accuracy vs speed)"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from emad_ref.measurements import ablations
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard")
def test_margin(emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator) -> None:
    shown = ablations.ablate_margin(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    assert (rows[0]["rise %"], rows[0]["net reduction %"]) == (0.0, 0.0)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    assert all(less["mean depth"] <= more["mean depth"] for less, more in pairwise(rows[1:])), (
        "larger margins go deeper"
    )
