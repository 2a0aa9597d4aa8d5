"""One table: sensitivity to EAD's constants, and speculative decoding of the same pair."""

from __future__ import annotations

import pytest

from pytest_emad.measurements.pair_measurements import PairMeasurements, make_cost_score_table
from pytest_emad.run.recorder import Recorder


@pytest.mark.emad(budget="standard", measures=True)
def test_one_table_of_switching_and_speculation(emad_pair: PairMeasurements, emad_record: Recorder) -> None:
    rules = emad_pair.routing_rules
    if absent := rules.absent_premise():
        pytest.skip(f"not applicable ({absent.reason})")
    if not rules.written_tasks_worth_routing:
        pytest.skip("not applicable (no answer is written)")
    shown = make_cost_score_table(emad_pair)
    for note in shown.notes:
        emad_record.record_note(note)
    (table,) = shown.tables
    emad_record.record_table(table.title, emad_pair.name, table.rows)
    shares = {row["large-model share %"] for row in table.rows}
    assert shares >= {0.0, 1.0}, "both models alone belong to the table"
