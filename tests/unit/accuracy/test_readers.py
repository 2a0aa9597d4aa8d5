"""Readers of finished evaluations: lm-eval's folders, inspect_ai's logs, tables."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pytest_emad.accuracy.comparison import compare_accuracy
from pytest_emad.accuracy.loading import read_evaluation
from tests.evaluation_folders import (
    DATE,
    LATER,
    choice_row,
    generated_row,
    inspect_sample,
    samples_file,
    write_choice_pair,
    write_inspect_eval,
    write_inspect_json,
    write_lm_eval,
    write_table,
)


def test_a_folder_its_model_folder_and_its_file_give_the_same_scores(tmp_path: Path) -> None:
    out, _ = write_choice_pair(tmp_path, 20, 2)
    named = [read_evaluation(path) for path in (out, samples_file(out).parent, samples_file(out))]
    for evaluation in named:
        (task,) = evaluation.tasks
        assert (task.task, task.filter, len(task.ids)) == ("letters", "none", 20)
        assert np.array_equal(task.scores["acc"], named[0].tasks[0].scores["acc"])
    assert named[0].model == "base-model"
    assert named[0].run == DATE


def test_filters_are_tasks_of_their_own_and_repeats_are_one_score(tmp_path: Path) -> None:
    rows = [
        generated_row(number, {"exact_match": score}, filter=name, repeats=3)
        for name, score in (("strict", 0.0), ("flexible", 1.0))
        for number in range(5)
    ]
    strict, flexible = read_evaluation(write_lm_eval(tmp_path, {"sums": rows})).tasks
    assert (strict.filter, strict.scores["exact_match"].sum()) == ("strict", 0)
    assert (flexible.filter, flexible.scores["exact_match"].tolist()) == ("flexible", [1.0] * 5)
    (texts,) = flexible.read_texts([3])
    assert (texts.prompt, texts.target, texts.answer, texts.response) == ("Sum 3?", "14", "14", "It is 14.")


def test_a_metric_over_all_items_is_left_out_by_name(tmp_path: Path) -> None:
    rows = [choice_row(n, {"acc": True, "mcc": [1, 1], "word_perplexity": -31.5}) for n in range(4)]
    evaluation = read_evaluation(write_lm_eval(tmp_path, {"letters": rows}))
    assert list(evaluation.tasks[0].scores) == ["acc"]
    assert {(each.subject, each.count) for each in evaluation.omissions} == {
        ("letters: mcc", 4),
        ("letters: word_perplexity", 4),
    }
    assert "outside 0–1" in evaluation.omissions[1].reason


def test_a_metric_whose_lower_values_are_better_is_turned_round(tmp_path: Path) -> None:
    rows = [choice_row(n, {"brier": 0.25}) for n in range(3)]
    folder = write_lm_eval(tmp_path, {"letters": rows}, directions={"letters": {"brier": False}})
    assert read_evaluation(folder).tasks[0].scores["brier"].tolist() == [0.75] * 3


def test_the_latest_date_counts_and_is_named(tmp_path: Path) -> None:
    for date, score in ((LATER, 1.0), (DATE, 0.0)):
        write_lm_eval(tmp_path, {"letters": [choice_row(n, {"acc": score}) for n in range(3)]}, date=date)
    evaluation = read_evaluation(tmp_path)
    assert evaluation.tasks[0].scores["acc"].tolist() == [1.0] * 3
    assert evaluation.notes == [f"letters: took samples_letters_{LATER}.jsonl, the latest of 2 dates"]
    assert [(each.subject, each.count) for each in evaluation.omissions] == [(f"samples_letters_{DATE}.jsonl", 1)]


def test_samples_without_results_are_read_and_that_is_told(tmp_path: Path) -> None:
    out, _ = write_choice_pair(tmp_path, 5)
    for results in out.glob("*/results_*"):
        results.unlink()
    (note,) = read_evaluation(out).notes
    assert note.startswith(f"no results_DATE.json beside samples_letters_{DATE}.jsonl: a higher score")


@pytest.mark.parametrize("by_size", [True, False])
def test_weights_of_a_group_are_those_of_its_own_score(tmp_path: Path, by_size: bool) -> None:
    tasks = {
        "a": [choice_row(n, {"acc": 1.0}) for n in range(30)],
        "b": [choice_row(n, {"acc": float(n < 2)}) for n in range(10)],
    }
    groups = {"inner": ["a", "b"], "outer": ["inner"]}
    evaluation = read_evaluation(write_lm_eval(tmp_path, tasks, groups=groups, by_size=by_size))
    (group,) = evaluation.groups  # the outermost
    assert (group.name, list(group.members), group.by_size) == ("outer", ["a", "b"], by_size)


def test_weights_that_equal_scores_leave_open_are_those_of_the_other_side(tmp_path: Path) -> None:
    """Both tasks of BASE have one score, so its group's score does not tell how it weighs them."""
    sides = []
    for name, date, few in (("base", DATE, 5), ("candidate", LATER, 2)):
        tasks = {
            "a": [choice_row(n, {"acc": float(n < 15)}) for n in range(30)],
            "b": [choice_row(n, {"acc": float(n < few)}) for n in range(10)],
        }
        groups = {"both": ["a", "b"]}
        sides.append(write_lm_eval(tmp_path / name, tasks, model=name, date=date, groups=groups, by_size=False))
    assert [read_evaluation(side).groups[0].by_size for side in sides] == [None, False]
    (test,) = compare_accuracy(*sides).tests
    assert test.leg.estimate == pytest.approx((0 + 0.3) / 2)


def test_a_group_of_unknown_weights_is_left_out_by_name(tmp_path: Path) -> None:
    tasks = {name: [choice_row(n, {"acc": float(n % k == 0)}) for n in range(10)] for name, k in (("a", 2), ("b", 5))}
    write_lm_eval(tmp_path, tasks, groups={"both": ["a", "b"]})
    (results,) = tmp_path.glob("*/results_*")
    content = json.loads(results.read_text())
    content["results"]["both"]["acc,none"] = 0.123
    results.write_text(json.dumps(content))
    evaluation = read_evaluation(tmp_path)
    assert evaluation.groups == []
    assert evaluation.omissions[0].subject == "both: acc,none"


def test_texts_of_a_choice_are_the_letters_and_the_lead_of_the_target(tmp_path: Path) -> None:
    rows = [choice_row(0, {"acc": 1.0}), choice_row(1, {"acc": 0.0})]
    (task,) = read_evaluation(write_lm_eval(tmp_path, {"letters": rows})).tasks
    right, wrong = task.read_texts([0, 1])
    assert (right.target, right.answer, right.lead) == ("B", "B", 1.0)
    assert (wrong.target, wrong.answer, wrong.lead) == ("B", "C", -0.5)


def test_a_field_of_the_document_gives_clusters(tmp_path: Path) -> None:
    rows = [choice_row(n, {"acc": 1.0}) for n in range(8)]
    (task,) = read_evaluation(write_lm_eval(tmp_path, {"letters": rows}), "BASE", "paragraph").tasks
    assert list(task.clusters) == ["0"] * 4 + ["1"] * 4


# ---------------------------------------------------------------- inspect_ai

VALUES = ["C", "I", "P", "N", True, 0.25, "yes", "0.5"]
NUMBERS = [1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 0.5]


@pytest.mark.parametrize("form", ["eval", "json"])
def test_values_of_inspect_count_as_inspect_counts_them(tmp_path: Path, form: str) -> None:
    samples = [inspect_sample(n, value) for n, value in enumerate(VALUES)]
    write = write_inspect_eval if form == "eval" else write_inspect_json
    evaluation = read_evaluation(write(tmp_path / f"a.{form}", samples))
    (task,) = evaluation.tasks
    assert task.scores["match"].tolist() == NUMBERS
    assert (evaluation.form, evaluation.model, evaluation.run) == ("inspect_ai", "mock/model", "run-a")
    assert task.read_texts([1])[0].answer == "answer I"


def test_epochs_of_a_sample_are_items_of_one_cluster(tmp_path: Path) -> None:
    samples = [inspect_sample(n, "C", epoch=epoch) for n in range(3) for epoch in (1, 2)]
    (task,) = read_evaluation(write_inspect_json(tmp_path / "a.json", samples)).tasks
    assert list(task.ids) == ["s0", "s0, epoch 2", "s1", "s1, epoch 2", "s2", "s2, epoch 2"]
    assert list(task.clusters) == ["s0", "s0", "s1", "s1", "s2", "s2"]
    (task,) = read_evaluation(tmp_path / "a.json", "BASE", "page").tasks
    assert list(task.clusters) == ["0"] * 4 + ["1"] * 2


def test_a_scorer_with_several_values_is_one_metric_each_and_a_list_is_none(tmp_path: Path) -> None:
    samples = [inspect_sample(n, {"style": 1, "facts": 0.5}) for n in range(3)]
    for sample in samples:
        sample["scores"]["vector"] = {"value": [1, 2], "answer": None}
    evaluation = read_evaluation(write_inspect_json(tmp_path / "a.json", samples))
    assert list(evaluation.tasks[0].scores) == ["match/style", "match/facts"]
    assert [each.subject for each in evaluation.omissions] == ["sums: vector"]


def test_samples_that_ended_in_an_error_are_counted(tmp_path: Path) -> None:
    samples = [inspect_sample(n, "C") for n in range(4)]
    samples[2]["scores"] = None
    evaluation = read_evaluation(write_inspect_json(tmp_path / "a.json", samples))
    assert list(evaluation.tasks[0].ids) == ["s0", "s1", "s3"]
    assert (evaluation.omissions[0].subject, evaluation.omissions[0].count) == ("sums: samples", 1)


def test_a_folder_of_logs_has_one_task_each(tmp_path: Path) -> None:
    write_inspect_json(tmp_path / "a.json", [inspect_sample(0, "C")], task="one")
    write_inspect_eval(tmp_path / "b.eval", [inspect_sample(0, "I")], task="two", run="run-b")
    assert [task.task for task in read_evaluation(tmp_path).tasks] == ["one", "two"]


def zstandard_archive(path: Path) -> Path:
    """Write a log with inspect_ai's compression, which ``zipfile`` cannot write before Python 3.14."""
    zstandard = pytest.importorskip("zstandard", reason="the extra `inspect` is not installed")
    import struct
    import zlib

    samples = [inspect_sample(n, "C") for n in range(3)]
    stored = write_inspect_eval(path, samples, compression=zipfile.ZIP_STORED)
    with zipfile.ZipFile(stored) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    body, directory = b"", b""
    for name, content in entries.items():
        packed = zstandard.ZstdCompressor().compress(content)
        fields = struct.pack(
            "<HHHHHIIIHH", 20, 0, 93, 0, 0, zlib.crc32(content), len(packed), len(content), len(name), 0
        )
        offset = len(body)
        body += b"PK\x03\x04" + fields + name.encode() + packed
        directory += b"PK\x01\x02" + struct.pack("<H", 20) + fields + struct.pack("<HHHII", 0, 0, 0, 0, offset)
        directory += name.encode()
    end = struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), len(directory), len(body), 0)
    path.write_bytes(body + directory + b"PK\x05\x06" + end)
    return path


def test_a_log_in_zstandard_is_read(tmp_path: Path) -> None:
    evaluation = read_evaluation(zstandard_archive(tmp_path / "a.eval"))
    assert evaluation.tasks[0].scores["match"].tolist() == [1.0] * 3


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_table_of_scores(tmp_path: Path, suffix: str) -> None:
    rows = [{"task": f"t{n % 2}", "id": n, "score": n / 4, "document": n // 2, "colour": "red"} for n in range(4)]
    evaluation = read_evaluation(write_table(tmp_path / f"scores{suffix}", rows))
    assert [(task.task, task.scores["score"].tolist()) for task in evaluation.tasks] == [
        ("t0", [0.0, 0.5]),
        ("t1", [0.25, 0.75]),
    ]
    assert list(evaluation.tasks[0].clusters) == ["document 0", "document 1"]
    assert evaluation.notes == ["columns that nothing reads: colour"]


@pytest.mark.parametrize(("text", "number"), [("true", 1.0), ("False", 0.0), ("1", 1.0), ("0.25", 0.25)])
def test_texts_of_a_csv_are_numbers_or_booleans(tmp_path: Path, text: str, number: float) -> None:
    path = write_table(tmp_path / "scores.csv", [{"task": "t", "id": 0, "score": text}])
    assert read_evaluation(path).tasks[0].scores["score"].tolist() == [number]
