"""Margin m: the curve of quality against what is saved. (EMAD, "Ablations": accuracy vs speed)"""

from __future__ import annotations

from itertools import pairwise

import pytest

from emad_ref.sweep.grids import emad_margins
from pytest_emad.ablated import Table, not_applicable

COUNTS = {"smoke": 5, "standard": 9, "full": 33}  # margins from 0 to the highest target, by budget


@pytest.mark.emad(budget="standard")
def test_margin(emad_evidence, emad_record, emad_rng):
    """A larger margin lowers every threshold, so no token goes less deep: the curve has an order."""
    evidence = emad_evidence
    if reason := not_applicable(evidence):
        pytest.skip(reason)
    table = Table(evidence, emad_rng)
    tried = emad_margins(evidence.profile, COUNTS[evidence.budget.name])
    rows = [table.full(**{"margin, nats": None}) | accuracies(evidence, evidence.full)]
    for point in tried:
        (row,) = table.rows([point], **{"margin, nats": point.margin_nats})
        rows.append(row | accuracies(evidence, point))
    emad_record.table(f"ablation, margin on {evidence.corpus}", evidence.name, rows)

    assert (rows[0]["rise %"], rows[0]["net reduction %"]) == (0.0, 0.0)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    assert all(less["mean depth"] <= more["mean depth"] for less, more in pairwise(rows[1:]))


def accuracies(evidence, point):
    return {f"{task} %": float(evidence.scored.correct(task, point).mean()) for task in evidence.scored.replayed}
