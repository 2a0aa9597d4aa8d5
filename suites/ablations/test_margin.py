"""Margin m: the curve of quality against what is saved. (EMAD, "Ablations": accuracy vs speed)"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from emad_ref.evidence.ablations import margin
from emad_ref.evidence.gathered import Evidence
from pytest_emad.recording import Recorder


@pytest.mark.emad(budget="standard")
def test_margin(emad_evidence: Evidence, emad_record: Recorder, emad_rng: np.random.Generator) -> None:
    shown = margin.ablation(emad_evidence, emad_rng)
    emad_record.exhibits(emad_evidence.name, shown)
    rows = shown.tables[0].rows
    assert (rows[0]["rise %"], rows[0]["net reduction %"]) == (0.0, 0.0)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    assert all(less["mean depth"] <= more["mean depth"] for less, more in pairwise(rows[1:])), (
        "larger margins go deeper"
    )
