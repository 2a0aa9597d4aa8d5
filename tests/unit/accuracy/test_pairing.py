"""Pairing of two evaluations: by id whatever the order, and everything that is left out is counted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from pytest_emad.accuracy.comparison import compare_accuracy
from pytest_emad.accuracy.loading import read_evaluation
from pytest_emad.accuracy.pairing import PairingOptions, number_clusters, pair_evaluations
from tests.evaluation_folders import (
    LATER,
    choice_row,
    generated_row,
    samples_file,
    write_choice_pair,
    write_lm_eval,
)


def test_items_are_paired_by_id_whatever_their_order(tmp_path: Path) -> None:
    base, candidate = write_choice_pair(tmp_path, 50, 5, 3)
    file = samples_file(candidate)
    lines = file.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    file.write_text("".join(lines))
    (scores,) = pair_evaluations(read_evaluation(base), read_evaluation(candidate), PairingOptions()).scores
    difference = scores.base - scores.candidate
    assert (int((difference > 0).sum()), int((difference < 0).sum())) == (5, 3)
    for index in np.flatnonzero(difference)[:2]:
        (texts,) = scores.read_texts([int(index)])
        assert texts[0].prompt == texts[1].prompt == f"Question {scores.ids[index]}: which letter?"


@pytest.mark.parametrize("side", ["base", "candidate"])
def test_items_that_either_side_calls_dependent_are_one_cluster(tmp_path: Path, side: str) -> None:
    for name in ("base", "candidate"):
        fields = ["task", "id", "score"] + ["document"] * (name == side)
        rows = [["t", str(n), "1"] + [str(n // 5)] * (name == side) for n in range(200)]
        (tmp_path / f"{name}.csv").write_text("\n".join(",".join(row) for row in [fields, *rows]))
    (test,) = compare_accuracy(tmp_path / "base.csv", tmp_path / "candidate.csv").tests
    assert (test.items, test.independent) == (200, 40)


def test_clusters_are_joined_by_those_of_the_other_side() -> None:
    assert number_clusters([("a", "x"), ("b", "x"), ("b", "y"), ("c", "z"), ("x", "w")]).tolist() == [0, 0, 0, 1, 2]


def test_a_metric_on_other_items_of_either_side_is_counted_and_not_judged(tmp_path: Path) -> None:
    sides = []
    for name, date, scored in (("base", "2026-11-30T10-00-00", 0), ("candidate", LATER, 1)):
        rows = [choice_row(n, {"acc": 1.0} | ({"f": 1.0} if n % 2 == scored else {})) for n in range(200)]
        sides.append(write_lm_eval(tmp_path / name, {"letters": rows}, model=name, date=date))
    comparison = compare_accuracy(*sides, common_items=True)
    assert [test.metric for test in comparison.tests] == ["acc"]
    assert any("without f" in each.reason and each.count == 200 for each in comparison.omissions)


def test_filters_are_paired_apart(tmp_path: Path) -> None:
    sides = []
    for name, date, strict in (("base", "2026-11-30T10-00-00", 1.0), ("candidate", LATER, 0.0)):
        rows = [
            generated_row(n, {"exact_match": score}, filter=each)
            for each, score in (("strict", strict), ("flexible", 1.0))
            for n in range(120)
        ]
        sides.append(write_lm_eval(tmp_path / name, {"sums": rows}, model=name, date=date))
    tests = {test.name: test for test in compare_accuracy(*sides).tests}
    assert {name: test.leg.outcome for name, test in tests.items()} == {
        "sums (strict)": "falsified",
        "sums (flexible)": "inconclusive",
    }


def test_common_items_are_judged_and_the_others_counted(tmp_path: Path) -> None:
    base, _ = write_choice_pair(tmp_path, 400)
    rows = [choice_row(n, {"acc": 1.0}) for n in range(300)]
    write_lm_eval(tmp_path / "fewer", {"letters": rows, "more": rows[:7]}, date=LATER)
    comparison = compare_accuracy(base, tmp_path / "fewer", common_items=True)
    assert [test.items for test in comparison.tests] == [300]
    assert [(each.subject, each.count, each.reason) for each in comparison.omissions] == [
        ("more", 7, "items of CANDIDATE alone"),
        ("letters: items", 100, "BASE alone has them"),
    ]


def test_changed_prompts_and_targets_are_counted_where_they_are_meant(tmp_path: Path) -> None:
    base, candidate = write_choice_pair(tmp_path, 20)
    file = samples_file(candidate)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["prompt_hash"] = "another"
        if number < 3:
            row["target_hash"] = "another"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = compare_accuracy(base, candidate, allow_changed_prompts=True).notes
    assert notes[:2] == (
        "letters: 20 of 20 items have another prompt, allowed by --allow-changed-prompts",
        "letters: 3 of 20 items have another target, allowed by --allow-changed-prompts",
    )


def test_tasks_and_metrics_that_are_not_named_are_counted(tmp_path: Path) -> None:
    sides = []
    for name, date in (("base", "2026-11-30T10-00-00"), ("candidate", LATER)):
        rows = [choice_row(n, {"acc": 1.0, "acc_norm": 1.0}) for n in range(10)]
        sides.append(write_lm_eval(tmp_path / name, {"a": rows, "b": rows, "c": rows}, model=name, date=date))
    comparison = compare_accuracy(*sides, tasks=["a"], metrics=["acc"])
    assert [(test.name, test.metric) for test in comparison.tests] == [("a", "acc")]
    assert [(each.subject, each.count, each.reason) for each in comparison.omissions] == [
        ("tasks: b, c", 2, "not named by --task"),
        ("a: acc_norm", 10, "not named by --metric"),
    ]


def test_a_metric_of_one_side_is_named(tmp_path: Path) -> None:
    rows = [choice_row(n, {"acc": 1.0, "acc_norm": 1.0}) for n in range(10)]
    base = write_lm_eval(tmp_path / "base", {"a": rows})
    fewer = [choice_row(n, {"acc": 1.0}) for n in range(10)]
    candidate = write_lm_eval(tmp_path / "candidate", {"a": fewer}, date=LATER)
    assert [(each.subject, each.reason) for each in compare_accuracy(base, candidate).omissions] == [
        ("a: acc_norm", "BASE alone has it")
    ]
    assert [(each.subject, each.reason) for each in compare_accuracy(candidate, base).omissions] == [
        ("a: acc_norm", "CANDIDATE alone has it")
    ]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_group_of_one_side_is_told(tmp_path: Path, swapped: bool) -> None:
    rows = [choice_row(n, {"acc": float(n % 2)}) for n in range(10)]
    base = write_lm_eval(tmp_path / "base", {"a": rows, "b": rows}, groups={"both": ["a", "b"]})
    candidate = write_lm_eval(tmp_path / "candidate", {"a": rows, "b": rows}, date=LATER)
    comparison = compare_accuracy(*((candidate, base) if swapped else (base, candidate)))
    assert [test.name for test in comparison.tests] == ["a", "b"]
    assert comparison.notes[0].startswith(f"both is a group of {'CANDIDATE' if swapped else 'BASE'} alone")
