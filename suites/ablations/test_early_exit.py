"""Minimum exit layer × method × pruning: how early, how well and at what cost? (early-exit LLMs, Figures 6 to 13)"""

from __future__ import annotations

import pytest

from emad_ref.measurements.early_exits import minimum_layer_tables
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.emad(budget="standard")
def test_minimum_exit_layer(emad_evidence: ModelMeasurements, emad_record: Recorder) -> None:
    """Every rule at every minimum layer at which it can decide; full depth on the first line of each task."""
    exits = emad_evidence.exits
    if absence := exits.absence:
        pytest.skip(f"{absence.outcome} ({absence.reason})")
    shown = minimum_layer_tables(exits)
    emad_record.exhibits(emad_evidence.name, shown)
    layers = emad_evidence.subject.stepper.layers
    for table in shown.tables:
        assert table.rows[0]["mean exit"] == layers
        assert all(row["j"] <= row["mean exit"] <= layers for row in table.rows[1:])
