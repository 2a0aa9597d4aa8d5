"""Tables that belong to no claim, ours and those of extensions."""

from __future__ import annotations

import pytest

from emad_ref.claims.tables import table_names, table_of
from emad_ref.measurements.model_measurements import ModelMeasurements
from pytest_emad.recorder import Recorder


@pytest.mark.parametrize("name", table_names())
def test_table(emad_evidence: ModelMeasurements, emad_record: Recorder, name: str) -> None:
    emad_record.record_attachments(emad_evidence.name, table_of(name)(emad_evidence))
