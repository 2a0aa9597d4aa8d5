"""Tables that belong to no claim, of this project and of extensions."""

from __future__ import annotations

import pytest

from pytest_emad.claims.tables import find_table_function, table_names
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.recorder import Recorder


@pytest.mark.parametrize("name", table_names())
def test_table(emad_evidence: ModelMeasurements, emad_record: Recorder, name: str) -> None:
    emad_record.record_tables_points_notes(emad_evidence.name, find_table_function(name)(emad_evidence))
