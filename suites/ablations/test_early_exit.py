"""Minimum exit layer × method × pruning: how early, how well and at what cost? (early-exit LLMs, Figures 6 to 13)"""

from __future__ import annotations

import pytest

from pytest_emad.exits import RULES, premise


@pytest.mark.emad(budget="standard")
def test_minimum_exit_layer(emad_evidence, emad_record, emad_register):
    """Every rule at every minimum layer at which it can decide; full depth on the first line of each task."""
    evidence = emad_evidence
    if missing := premise(evidence, emad_register["EE-3"]):
        pytest.skip(f"{missing.verdict} ({missing.reason})")
    exits, layers = evidence.exits, evidence.stepper.layers
    for task in exits.tasks:
        rows = [exits.row(task, "full depth", layers, exits.under(task, exits.full))]
        # a contrast needs a layer below, a pruned readout one above that is not the last
        for minimum in range(2, layers - 1):
            rows += [exits.row(task, rule, minimum, exits.answered(task, rule, minimum)) for rule in RULES]
        title = f"ablation, minimum exit layer on {exits.asked.title(task)}"
        emad_record.table(title, evidence.name, rows, figure="exits by minimum layer")

        assert rows[0]["mean exit"] == layers
        assert all(row["j"] <= row["mean exit"] <= layers for row in rows[1:])
