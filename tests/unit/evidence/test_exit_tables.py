"""Tables about early exits: which rules stand on them does not depend on what was asked before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.measurements.early_exit_tasks import exact_match
from emad_ref.measurements.early_exits import RULES, minimum_layer_tables, rule_table
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.run_resources import RunResources
from emad_ref.statistics.units import ByItem
from tests.small_exits import LAYERS, MINIMA, WORLD_TASKS, few_items
from tests.small_exits import TUNED as SMALL

ITEMS = 4


@pytest.fixture(scope="module")
def evidence() -> Iterator[ModelMeasurements]:
    with few_items(SMALL, ITEMS) as made:
        yield made


def test_full_depth_then_every_rule_at_the_papers_minima_whatever_was_asked_before(evidence: ModelMeasurements) -> None:
    exits = evidence.exits
    exits.answered("summary", "JSD", 6)
    exits.answered("qa", "softmax", 4)  # no minimum of the paper's
    (table,) = rule_table(exits).tables
    per_task = [("full depth", LAYERS), *((rule, minimum) for minimum in MINIMA for rule in RULES)]
    assert [(r["task"], r["rule"], r["j"]) for r in table.rows] == [
        (task, *each) for task in WORLD_TASKS for each in per_task
    ]
    assert (table.title, table.figure) == ("early exits on world:pairs", "FLOPs by rule")
    assert all(row["j"] <= row["mean exit"] <= LAYERS for row in table.rows)


def test_answers_have_exact_match_and_summaries_have_none(evidence: ModelMeasurements) -> None:
    exits = evidence.exits
    (table,) = rule_table(exits).tables
    qa, summary = (next(row for row in table.rows if row["task"] == task) for task in ("qa", "summary"))
    done = exits.under("qa", exits.full)
    references = [pair.answers for pair in exits.asked.items("qa").pairs]
    right = [exact_match("qa", text, answers) for text, answers in zip(done.texts, references, strict=True)]
    assert qa["exact match"] == np.mean(right)
    assert summary["exact match"] is None


def test_flops_that_were_not_counted_are_none_and_unsolved_tasks_are_noted(evidence: ModelMeasurements) -> None:
    """A decoder that does not count, and answers nothing right on one of three tasks."""
    exits = ModelMeasurements(evidence.loaded, evidence.study, RunResources()).exits
    exits.asked._items.update(evidence.exits.asked._items)
    for task in exits.tasks:
        for point in [exits.full, *(exits.point(rule, minimum) for minimum in exits.minima for rule in RULES)]:
            done = evidence.exits.under(task, point)
            wrong = replace(done.exited, score=ByItem.distinct(np.zeros(ITEMS))) if task == "qa" else done.exited
            exits._answered[task, point] = replace(done, counted=None, exited=wrong)
    shown = rule_table(exits)
    assert {row["together MFLOPs"] for row in shown.tables[0].rows} == {None}
    (said,) = [note for note in shown.notes if note.startswith(f"{SMALL}: qa: ")]
    assert "not solved: full depth scores 0.000, an honest guess 0.0" in said


@pytest.mark.slow  # every minimum layer under every rule
def test_the_ablation_has_a_table_per_task_with_every_minimum_layer(evidence: ModelMeasurements) -> None:
    shown = minimum_layer_tables(evidence.exits)
    assert [table.title for table in shown.tables] == [
        f"ablation, minimum exit layer on world:pairs, {task}" for task in WORLD_TASKS
    ]
    for table in shown.tables:
        assert (table.rows[0]["rule"], table.rows[0]["mean exit"]) == ("full depth", LAYERS)
        assert [row["j"] for row in table.rows[1:]] == [minimum for minimum in range(2, LAYERS - 1) for _ in RULES]
        assert all(row["j"] <= row["mean exit"] <= LAYERS for row in table.rows[1:])
