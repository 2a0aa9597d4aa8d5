"""Ablations of EMAD's design choices, one table each (EMAD, "Ablations", "Calibration stability")."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pytest_emad.measurements import ablations
from pytest_emad.measurements.early_exits import tabulate_minimum_layers_by_task
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.recorder import Recorder

Rows = list[dict[str, Any]]
Ablate = Callable[[Callable[..., Any]], Rows]
STANDARD = pytest.mark.emad(budget="standard")
MEASURED = pytest.mark.emad(budget="standard", measures=True)


@pytest.fixture
def ablate(emad_evidence: ModelMeasurements, emad_record: Recorder, emad_rng: np.random.Generator) -> Ablate:
    """Run an ablation, record its table and return the rows."""

    def rows(ablation: Callable[..., Any]) -> Rows:
        shown = ablation(emad_evidence, emad_rng)
        emad_record.record_tables_points_notes(emad_evidence.name, shown)
        found: Rows = shown.tables[0].rows
        return found

    return rows


def require_net_at_most_gross(rows: Rows) -> None:
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)


def require_first_row_is_full_depth(rows: Rows) -> None:
    assert (rows[0]["rise %"], rows[0]["net reduction %"]) == (0.0, 0.0)


def require_depth_rising_with_margin(rows: Rows) -> None:
    depths = [row["mean depth"] for row in rows]
    assert depths == sorted(depths), "a larger margin lowers thresholds: deeper"


@STANDARD
def test_calibration_corpus(ablate: Ablate) -> None:
    """A profile calibrated on corpus A, applied to corpus B."""
    rows = ablate(ablations.ablate_calibration_corpus)
    corpora = {row["text"] for row in rows}
    assert len(corpora) == 2
    assert {(row["text"], row["profile"]) for row in rows} == {(a, b) for a in corpora for b in {*corpora, "none"}}
    full = [row for row in rows if row["profile"] == "none"]
    assert all((row["rise %"], row["net reduction %"]) == (0.0, 0.0) for row in full)
    require_net_at_most_gross(rows)
    for text in corpora:
        for profile in corpora:
            require_depth_rising_with_margin([row for row in rows if (row["text"], row["profile"]) == (text, profile)])


@STANDARD
def test_conditioning(ablate: Ablate) -> None:
    """Thresholds per bin of one or two token features, against one threshold."""
    rows = ablate(ablations.ablate_threshold_bins)
    require_first_row_is_full_depth(rows)
    require_net_at_most_gross(rows)
    assert all(row["fallen back"] <= row["bins"] for row in rows)
    for features in {row["features"] for row in rows}:
        require_depth_rising_with_margin([row for row in rows if row["features"] == features])


@STANDARD
def test_minimum_exit_layer(emad_evidence: ModelMeasurements, emad_record: Recorder) -> None:
    """Every rule at every minimum layer at which it can decide (early-exit LLMs, Figures 6 to 13).

    Full depth is the first line of each task.
    """
    exits = emad_evidence.early_exits
    if absence := exits.absent_premise:
        outcome = "not applicable" if absence.lacking == "premise" else "unmeasured"
        pytest.skip(f"{outcome} ({absence.reason})")
    shown = tabulate_minimum_layers_by_task(exits)
    emad_record.record_tables_points_notes(emad_evidence.name, shown)
    layers = emad_evidence.subject.stepper.layers
    for table in shown.tables:
        assert table.rows[0]["mean exit"] == layers
        assert all(row["j"] <= row["mean exit"] <= layers for row in table.rows[1:])


@MEASURED
def test_entropy_estimator(ablate: Ablate) -> None:
    """Cheaper entropy estimators: FLOPs saved and quality lost."""
    rows = ablate(ablations.ablate_estimator)
    require_net_at_most_gross(rows)
    assert all(row["probe FLOPs per token"] >= 0 for row in rows)
    linear = next(row for row in rows if row["estimator"] == "linear")
    dear = next(row for row in rows if row["estimator"].startswith("topk"))
    assert linear["probe FLOPs per token"] < dear["probe FLOPs per token"]


@STANDARD
def test_flatness(ablate: Ablate) -> None:
    """EMAD-E11: whether steeper profiles gain more, over the available models and corpora (EMAD, "Limitations")."""
    rows = ablate(ablations.tabulate_profile_flatness)
    assert len({(row["model"], row["corpus"]) for row in rows}) == len(rows)
    assert all(0 <= row["net reduction at equal quality %"] < 1 for row in rows)


@MEASURED
def test_interpolation(ablate: Ablate) -> None:
    """Interpolation between probes, which also exits at layers without a probe."""
    rows = ablate(ablations.ablate_exit_interpolation)
    require_net_at_most_gross(rows)
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        assert (off["interpolation"], on["interpolation"]) == ("off", "on")
        assert on["mean depth"] <= off["mean depth"], "more places to exit never let a token go deeper"


@STANDARD
def test_margin(ablate: Ablate) -> None:
    """Quality against FLOPs saved, by margin."""
    rows = ablate(ablations.ablate_margin)
    require_first_row_is_full_depth(rows)
    require_net_at_most_gross(rows)
    assert all(less["mean depth"] <= more["mean depth"] for less, more in pairwise(rows[1:])), "deeper by margin"


@MEASURED
def test_schedule(ablate: Ablate, emad_evidence: ModelMeasurements) -> None:
    """The same rule with and without monotone depth: cost and saving."""
    replayed = [row for row in ablate(ablations.ablate_schedule) if row["text"] == ablations.REPLAYED]
    eager, monotone = ([row for row in replayed if row["schedule"] == name] for name in ("eager backfill", "monotone"))
    # backfill runs every block but the last's of tokens that stopped: no more than a layer's share can be saved
    layers = emad_evidence.subject.stepper.layers
    assert all(row["gross reduction %"] <= 1 / layers for row in eager)
    require_net_at_most_gross([*eager, *monotone])
    for bound, free in zip(monotone, eager, strict=True):
        assert free["mean depth"] >= bound["mean depth"], "monotone depth is a minimum over the tokens before"
        assert free["net reduction %"] <= bound["net reduction %"]


@STANDARD
def test_probe_stride(ablate: Ablate) -> None:
    """More or fewer probes: FLOPs saved and quality lost."""
    rows = ablate(ablations.ablate_stride)
    require_first_row_is_full_depth(rows)
    require_net_at_most_gross(rows)
    assert all(row["mean depth"] >= int(row["layers"].split(",")[0]) for row in rows[1:])
