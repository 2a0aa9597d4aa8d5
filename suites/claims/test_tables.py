"""Tables that belong to no claim, ours and those of extensions."""

from __future__ import annotations

import pytest

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.tables import table_names, table_of
from pytest_emad.recording import Recorder


@pytest.mark.parametrize("name", table_names())
def test_table(emad_evidence: Evidence, emad_record: Recorder, name: str) -> None:
    emad_record.exhibits(emad_evidence.name, table_of(name)(emad_evidence))
