"""Rankings: savings at equal loss, order of rows, upper bounds, and the rows of the figure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.point import full_depth
from emad_ref.replay.losses import Losses
from pytest_emad.screening.ranking import (
    ComparedFamily,
    FamilySaving,
    rank_family_savings,
    saving_figure_rows,
    saving_table_rows,
)

LEVELS = (0.01, 0.05)


def points(name: str, rises: list[float], net: list[float], blocks: list[float]) -> Losses:
    """Return points on four equal windows of three documents: the rises and savings of those after full depth."""
    document, tokens = np.array([0, 0, 1, 2]), np.full(4, 10)
    nats = 10 * (1 + np.log1p(np.array([0.0, *rises])))
    costs = (100 * (1 - np.array([0.0, *saved])).round(6) for saved in (net, blocks))
    columns = dict(zip(("nats", "wrong", "flops", "depth"), (nats, 0 * nats, *costs), strict=True))
    named = [replace(full_depth(4), name=f"{name} {at}") for at in range(1 + len(rises))]
    windows = {column: np.tile(values[:, None], 4) for column, values in columns.items()}
    return Losses.of_sequences(named, document, tokens, windows)  # type: ignore[arg-type]


KNOWING = ComparedFamily("oracle", points("oracle", [0.005, 0.05], [0.20, 0.50], [0.25, 0.60]))
GATE = ComparedFamily("gate", points("gate", [0.01, 0.05], [0.30, 0.45], [0.40, 0.50]))
ENTROPY_POINTS = points("entropy", [0.01, 0.02, 0.05], [0.10, 0.01, 0.20], [0.45, 0.46, 0.55])
ENTROPY = ComparedFamily("entropy", ENTROPY_POINTS, ENTROPY_POINTS)


def rank(families: list[ComparedFamily]) -> list[FamilySaving]:
    return rank_family_savings(families, np.random.default_rng(0), LEVELS, resamples=19)


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
    rows = saving_figure_rows([judged, KNOWING])
    assert [row["point"] for row in rows if row["family"] == "entropy"] == ["entropy 0", "entropy 2", "entropy 3"]
    assert [row["rise %"] for row in rows if row["family"] == "entropy"] == pytest.approx([0, 0.02, 0.05])
    assert [row["net reduction %"] for row in rows if row["family"] == "oracle"] == pytest.approx([0, 0.2, 0.5])
    assert [row["kind"] for row in rows] == ["criterion"] * 3 + ["ceiling"] * 3
    assert all(type(row["rise %"]) is float for row in rows)
