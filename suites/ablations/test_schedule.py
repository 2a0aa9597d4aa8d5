"""Schedule: what does the same rule cost and save with and without monotone depth? (EMAD, "Ablations")"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.measurements import ablations
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard", measures=True)
def test_schedule(emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator) -> None:
    shown = ablations.ablate_schedule(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    replayed = [row for row in rows if row["text"] == ablations.REPLAYED]
    eager, monotone = ([row for row in replayed if row["schedule"] == name] for name in ("eager backfill", "monotone"))
    # backfill runs every block but the last's of tokens that stopped: no more than a layer's share can be saved
    layers = emad_evidence.subject.stepper.layers
    assert all(row["gross reduction %"] <= 1 / layers for row in eager)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in [*eager, *monotone])
    for bound, free in zip(monotone, eager, strict=True):
        assert free["mean depth"] >= bound["mean depth"], "monotone depth is a minimum over the tokens before"
        assert free["net reduction %"] <= bound["net reduction %"]
