"""Exit to non-probe layers: what does interpolation between probes gain? (EMAD, "Ablations": optional)"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.measurements import ablations
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard", measures=True)
def test_interpolation(emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator) -> None:
    shown = ablations.ablate_interpolation(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        assert (off["interpolation"], on["interpolation"]) == ("off", "on")
        assert on["mean depth"] <= off["mean depth"], "more places to exit never let a token go deeper"
