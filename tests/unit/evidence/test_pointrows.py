"""Rows of the operating-point table and the sentences beside it, on a small model and few documents."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.claims import emad_f1
from emad_ref.claims.base import ClaimContext, ask
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.operating_points import (
    CandidatePoints,
    best_truncations,
    collapse_note,
    point_attachments,
    point_rows,
    reading_note,
    task_attachments,
)
from emad_ref.measurements.run_resources import RunResources
from emad_ref.measurements.study import BUDGETS, Study
from emad_ref.models.loading import load
from emad_ref.statistics.verdicts import load_register

FEW = replace(BUDGETS["smoke"], calibrate=12, validate=6, evaluate=9, items=4)


@pytest.fixture(scope="module")
def evidence() -> ModelMeasurements:
    return ModelMeasurements(load("emad-nano"), Study(corpus="world:premise", budget=FEW), RunResources())


@pytest.fixture(scope="module")
def points(evidence: ModelMeasurements) -> CandidatePoints:
    return evidence.points


def test_full_depth_comes_first_then_points_put_forward_then_their_rivals(points: CandidatePoints):
    rows = point_rows(points, {points.losses[0].point.name: (0.001, 0.002)})
    names = [loss.point.name for loss in (points.full_loss, *points.losses, *best_truncations(points))]
    assert [row["name"] for row in rows] == names
    assert [row["roles"][:1] for row in rows[:2]] == [[], ["calibrated default"]]
    assert [row["interval"] for row in rows[:2]] == [None, (0.001, 0.002)]
    assert all(row["net_reduction"] == loss.net_reduction for row, loss in zip(rows[1:], points.losses, strict=False))
    json.dumps(rows, allow_nan=False)


def test_a_rival_is_the_best_truncation_that_saves_as_much_and_has_no_accuracy(points: CandidatePoints):
    saving = [loss for loss in points.losses if loss.net_reduction > 0]
    rivals = best_truncations(points)
    assert rivals
    assert len(set(rivals)) == len(rivals)
    for rival in rivals:
        assert any(rival.net_reduction >= loss.net_reduction for loss in saving)
    rows = {row["name"]: row for row in point_rows(points, {})}
    assert all(rows[rival.point.name]["accuracy"] == {} for rival in rivals)
    assert set(rows["full depth"]["accuracy"]) == set(points.scored.tasks)
    assert all(full == same for full, same in rows["full depth"]["accuracy"].values())


def test_a_row_says_which_tasks_do_not_count_and_why(points: CandidatePoints):
    rows = {row["name"]: row for row in point_rows(points, {})}
    assert rows["full depth"]["not_counted"] == {}, "nothing is asked of full depth"
    for loss in points.losses:
        said = rows[loss.point.name]["not_counted"]
        held = {task: points.scored.at(task, loss.point) for task in points.scored.tasks}
        assert said == {task: at.standing for task, at in held.items() if not at.counts}
        assert said, "four items of a task show nothing"


def test_notes_say_what_was_read_and_how_soon_depth_was_down(points: CandidatePoints):
    notes = point_attachments(points, {}).notes
    assert notes[0] == reading_note(points)
    assert notes[0].startswith("emad-nano: perplexity on world:premise, 9 documents in 9 windows of up to 512 tokens")
    assert len(notes) == 1 + len(points.losses)
    assert "mean depth by position" in notes[1]
    assert collapse_note(points, points.full_loss) == "emad-nano: full depth: no probes, depth is fixed"


def test_tasks_make_a_table_only_where_some_were_scored(points: CandidatePoints):
    assert task_attachments(points).tables == task_attachments(points).notes == ()
    asked = []

    def rows(at):
        asked.extend(at)
        return [{"task": "arc_easy", "point": point.name} for point in at]

    published = SimpleNamespace(rows=rows, note="lm-eval's arc_easy")
    held = SimpleNamespace(scored=SimpleNamespace(published=published), put_forward=points.put_forward)
    (table,) = task_attachments(held).tables
    assert table.title == "lm-eval's tasks at the points put forward"
    assert len(table.rows) == len(asked) == len(points.put_forward)
    assert task_attachments(held).notes == ("lm-eval's arc_easy",)


def test_the_question_shows_the_table_with_the_intervals_it_decided_by(evidence: ModelMeasurements):
    asked = ClaimContext(load_register()["EMAD-F1"], evidence.name, np.random.default_rng(0))
    answer = ask(emad_f1.QUESTION, evidence, asked)
    by_leg = {leg.name: leg.interval for leg in answer.verdict.legs}
    judged = [row for row in answer.exhibits.points if row["interval"] is not None]
    assert judged
    for row in judged:
        assert row["interval"] == by_leg[f"{row['name']}: perplexity on world:premise"]
