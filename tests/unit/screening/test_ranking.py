"""Rankings: savings at equal loss, order of rows, upper bounds, and the rows of the figure."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emad_ref.calibration.trace import Trace
from emad_ref.replay.losses import PointColumnsBySequence
from pytest_emad.screening.ranking import (
    ComparedFamily,
    FamilySaving,
    TraceWithDocuments,
    rank_family_savings,
    saving_figure_rows,
    saving_table_rows,
)
from pytest_emad.statistics.units import DocumentMembership
from pytest_emad.sweep.oracle_savings import SavingsCurve

LEVELS = (0.01, 0.05)
NOTHING: Trace = None  # type: ignore[assignment]  # a ranking reads columns, and documents
READ = TraceWithDocuments(
    NOTHING, DocumentMembership(np.array([0, 0, 1, 2]))
)  # four windows of ten tokens, of three documents


def points(name: str, rises: list[float], net: list[float], blocks: list[float]) -> SavingsCurve:
    """Return points on equal windows: perplexity rises, net savings and block savings of those after full depth."""
    each = np.ones((4, 1))
    nats = 10 * (1 + np.log1p(np.array([0.0, *rises])))
    costs = (100 * (1 - np.array([0.0, *saved])) for saved in (net, blocks))
    columns = PointColumnsBySequence(each * nats, each * 0, *(each * cost for cost in costs))
    names = tuple(f"{name} {at}" for at in range(1 + len(rises)))
    return SavingsCurve(name, names, np.arange(1.0 + len(rises)), columns, np.full(4, 10.0))


KNOWING = ComparedFamily("oracle", points("oracle", [0.005, 0.05], [0.20, 0.50], [0.25, 0.60]))
GATE = ComparedFamily("gate", points("gate", [0.01, 0.05], [0.30, 0.45], [0.40, 0.50]))
ENTROPY_POINTS = points("entropy", [0.01, 0.02, 0.05], [0.10, 0.01, 0.20], [0.45, 0.46, 0.55])
ENTROPY = ComparedFamily("entropy", ENTROPY_POINTS, ENTROPY_POINTS)


def rank(families: list[ComparedFamily]) -> list[FamilySaving]:
    return rank_family_savings(families, READ, READ, np.random.default_rng(0), LEVELS, resamples=19)


def test_rows_stand_by_level_and_then_by_what_is_saved_net() -> None:
    gate = ComparedFamily("gate", GATE.judged, GATE.judged)
    rows = rank([ENTROPY, gate, KNOWING])
    assert [(row.level, row.family) for row in rows] == [
        (0.01, "gate"), (0.01, "oracle"), (0.01, "entropy"), (0.05, "oracle"), (0.05, "gate"), (0.05, "entropy"),
    ]  # fmt: skip
    found = {(row.family, row.level): (row.net.value, row.blocks.value) for row in rows}
    assert found["gate", 0.01] == pytest.approx((0.30, 0.40))
    assert found["entropy", 0.05] == pytest.approx((0.20, 0.55))
    share = (math.log1p(0.01) - math.log1p(0.005)) / (math.log1p(0.05) - math.log1p(0.005))
    assert found["oracle", 0.01] == pytest.approx((0.2 + 0.3 * share, 0.25 + 0.35 * share))
    assert {row.net.n for row in rows} == {3}, "documents, not windows"
    (first, *_) = saving_table_rows(rows)
    assert first["family"] == "gate"
    assert (first["net low %"], first["net high %"]) == pytest.approx((0.3, 0.3))


def test_the_figure_gets_corners_of_the_chosen_split_as_they_are_judged() -> None:
    judged = ComparedFamily(
        "entropy", ENTROPY_POINTS, points("entropy", [0.01, 0.001, 0.5], [0.1, 0.15, 0.2], [0, 0, 0])
    )
    rows = saving_figure_rows([judged, KNOWING], READ, READ)
    assert [row["point"] for row in rows if row["family"] == "entropy"] == ["entropy 0", "entropy 2", "entropy 3"]
    assert [row["rise %"] for row in rows if row["family"] == "entropy"] == pytest.approx([0, 0.02, 0.05])
    assert [row["net reduction %"] for row in rows if row["family"] == "oracle"] == pytest.approx([0, 0.2, 0.5])
    assert [row["kind"] for row in rows] == ["criterion"] * 3 + ["ceiling"] * 3
    assert all(type(row["rise %"]) is float for row in rows)
