"""Damaged, foreign and unlike evaluations: each ends with one line that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emad_ref.errors import EmadError
from pytest_emad import cli
from pytest_emad.accuracy.comparison import compare_accuracy
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

Pair = tuple[Path, Path]
DAMAGES: dict[
    str, tuple[Callable[[Path], Pair], str, str]
] = {}  # name → (files, part of the reason, part of the remedy)


def damage(reason: str, remedy: str) -> Callable[[Callable[[Path], Pair]], Callable[[Path], Pair]]:
    def keep(write: Callable[[Path], Pair]) -> Callable[[Path], Pair]:
        DAMAGES[write.__name__] = write, reason, remedy
        return write

    return keep


def with_rows(pair: Pair, change: Callable[[list[dict[str, Any]]], list[Any]], task: str = "letters") -> Pair:
    """Change the candidate's rows."""
    file = samples_file(pair[1], task)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))
    return pair


def each_row(pair: Pair, **changes: Any) -> Pair:
    return with_rows(pair, lambda rows: [{**row, **changes} for row in rows])


def without_key(pair: Pair, key: str) -> Pair:
    return with_rows(pair, lambda rows: [{name: row[name] for name in row if name != key} for row in rows])


# ---------------------------------------------------------------- paths


@damage("there is no such file or folder", "name one that exists")
def nothing_there(folder: Path) -> Pair:
    return write_choice_pair(folder)[0], folder / "nowhere"


@damage("it holds nothing", "name the folder of --output_path")
def an_empty_folder(folder: Path) -> Pair:
    (folder / "empty").mkdir()
    return write_choice_pair(folder)[0], folder / "empty"


@damage("it is none of these", "name another file")
def another_kind_of_file(folder: Path) -> Pair:
    (folder / "notes.txt").write_text("hello")
    return write_choice_pair(folder)[0], folder / "notes.txt"


@damage("but no samples_TASK_DATE.jsonl", "lm_eval --log_samples")
def results_without_samples(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    samples_file(pair[1]).unlink()
    return pair


@damage("it is none of these", "name its folder")
def the_results_file_itself(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    (results,) = pair[1].glob("*/results_*")
    return pair[0], results


@damage("it holds one, two", "name one of these folders")
def a_folder_of_two_models(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    for name in ("one", "two"):
        write_lm_eval(folder / "both", {"letters": [choice_row(0, {"acc": 1.0})]}, model=name)
    return pair[0], folder / "both"


@damage("both are one path", "name two evaluations")
def one_side_twice(folder: Path) -> Pair:
    base, _ = write_choice_pair(folder)
    return base, base / ".." / base.name


@damage(f"both are the run {DATE}", "name two evaluations")
def a_copy_of_one_side(folder: Path) -> Pair:
    base, _ = write_choice_pair(folder)
    shutil.copytree(base, folder / "copy")
    return base, folder / "copy"


@damage("BASE is of lm-eval, CANDIDATE of table", "evaluate both with one tool")
def two_tools(folder: Path) -> Pair:
    table = write_table(folder / "scores.csv", [{"task": "letters", "id": 0, "score": 1}])
    return write_choice_pair(folder)[0], table


# ---------------------------------------------------------------- rows of lm-eval


@damage("so it is truncated", "evaluate again")
def a_file_cut_inside_a_line(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    file = samples_file(pair[1])
    file.write_bytes(file.read_bytes()[:-200])
    return pair


@damage("has 300 rows, but", "evaluate again")
def a_file_cut_between_lines(folder: Path) -> Pair:
    return with_rows(write_choice_pair(folder), lambda rows: rows[:300])


@damage("it has none", "evaluate again")
def an_empty_file(folder: Path) -> Pair:
    return with_rows(write_choice_pair(folder), lambda rows: [])


@damage("line 1 is a list", "evaluate again")
def rows_that_are_no_objects(folder: Path) -> Pair:
    return with_rows(write_choice_pair(folder), lambda rows: [[1, 2]])


@damage("line 1 has no doc_hash", "lm_eval --log_samples")
def rows_without_hashes(folder: Path) -> Pair:
    return without_key(write_choice_pair(folder), "doc_hash")


@damage("lists acc among its metrics but has no such key", "evaluate again")
def a_metric_without_its_key(folder: Path) -> Pair:
    return without_key(write_choice_pair(folder), "acc")


@damage("no row has a metric", "a metric that scores each item")
def an_empty_metric(folder: Path) -> Pair:
    return each_row(write_choice_pair(folder), metrics=[])


@damage("acc has no number per item", "a metric that scores each item")
def only_a_metric_over_all_items(folder: Path) -> Pair:
    return each_row(write_choice_pair(folder), acc=[1, 0])


@damage("acc has scores outside 0–1", "a metric that scores each item")
def scores_beyond_one(folder: Path) -> Pair:
    return each_row(write_choice_pair(folder), acc=100.0)


@damage("acc is nan for item 8 and 0 others", "evaluate these items again")
def a_score_that_is_nan(folder: Path) -> Pair:
    def spoil(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "acc": float("nan")} if number == 7 else row for number, row in enumerate(rows)]

    return with_rows(write_choice_pair(folder), spoil)


@damage("acc is null for item 1 and 399 others", "evaluate these items again")
def scores_that_are_null(folder: Path) -> Pair:
    return each_row(write_choice_pair(folder), acc=None)


@damage("id '0' stands 2 times, as do 399 others", "two runs may have been written to one file")
def ids_that_repeat(folder: Path) -> Pair:
    return with_rows(write_choice_pair(folder), lambda rows: rows + rows)


@damage("no JSON", "evaluate again")
def a_file_in_utf16(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    file = samples_file(pair[1])
    file.write_bytes(file.read_text().encode("utf-16"))
    return pair


@damage("git-lfs pointer", "git lfs pull")
def a_pointer_in_place_of_the_file(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    samples_file(pair[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    return pair


@damage("results_", "lm_eval --log_samples")
def damaged_results(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    (results,) = pair[1].glob("*/results_*")
    results.write_text("{")
    return pair


# ---------------------------------------------------------------- sides that do not match


@damage("100 of 400 items of the other side are missing, such as id '300'", "pass --common-items to judge the 300")
def other_items(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    write_lm_eval(folder / "fewer", {"letters": [choice_row(n, {"acc": 1.0}) for n in range(300)]}, date=LATER)
    return pair[0], folder / "fewer"


@damage("BASE has letters; CANDIDATE has numbers", "evaluate both on the same tasks")
def other_tasks(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    return pair[0], write_choice_pair(folder / "other", task="numbers")[1]


@damage("numbers: CANDIDATE alone has it", "choose by --task letters")
def one_more_task(folder: Path) -> Pair:
    pair = write_choice_pair(folder)
    write_lm_eval(pair[1], {"numbers": [choice_row(0, {"acc": 1.0})]}, model="candidate-model", date=LATER)
    return pair


@damage("BASE has letters (strict); CANDIDATE has letters", "evaluate both on the same tasks")
def another_filter(folder: Path) -> Pair:
    rows = [generated_row(n, {"acc": 1.0}, filter="strict") for n in range(5)]
    return write_lm_eval(folder / "strict", {"letters": rows}), write_choice_pair(folder, 5)[1]


@damage("400 of 400 items have another document, such as id '0'", "one version of the data set")
def other_documents(folder: Path) -> Pair:
    return each_row(write_choice_pair(folder), doc_hash="another")


@damage("400 of 400 items have another prompt", "--allow-changed-prompts")
def changed_prompts(folder: Path) -> Pair:
    return each_row(write_choice_pair(folder), prompt_hash="another")


@damage("400 of 400 items have another target", "--allow-changed-prompts")
def changed_targets(folder: Path) -> Pair:
    return each_row(write_choice_pair(folder), target_hash="another")


@damage("BASE has acc; CANDIDATE has acc_norm", "the same metrics")
def another_metric(folder: Path) -> Pair:
    return each_row(write_choice_pair(folder), metrics=["acc_norm"], acc_norm=1.0)


@damage("10 items have acc_norm on one side alone", "--common-items")
def a_metric_of_some_items(folder: Path) -> Pair:
    pair = write_choice_pair(folder, 40)
    for side in pair:
        with_rows((side, side), lambda rows: [{**row, "metrics": ["acc", "acc_norm"], "acc_norm": 1.0} for row in rows])
    return with_rows(pair, lambda rows: [{**row, "metrics": ["acc"]} if n < 10 else row for n, row in enumerate(rows)])


# ---------------------------------------------------------------- inspect_ai


def inspect_pair(folder: Path, *, samples: int = 5, **header: Any) -> Pair:
    rows = [inspect_sample(n, "C") for n in range(samples)]
    return (
        write_inspect_json(folder / "base.json", rows),
        write_inspect_json(folder / "candidate.json", rows, **{"run": "run-b", **header}),
    )


def with_log(pair: Pair, change: Callable[[dict[str, Any]], object]) -> Pair:
    log = json.loads(pair[1].read_text())
    change(log)
    pair[1].write_text(json.dumps(log))
    return pair


@damage("its status is 'cancelled'", "inspect eval-retry")
def a_log_that_did_not_finish(folder: Path) -> Pair:
    return with_log(inspect_pair(folder), lambda log: log.update(status="cancelled"))


@damage("it has no samples", "--no-log-samples")
def a_log_without_samples(folder: Path) -> Pair:
    return with_log(inspect_pair(folder), lambda log: log.update(samples=[]))


@damage("it has 4 of 5 samples", "inspect eval-retry")
def a_log_short_of_a_sample(folder: Path) -> Pair:
    return with_log(inspect_pair(folder), lambda log: log["samples"].pop())


@damage("match is nan", "evaluate these items again")
def an_unscored_sample(folder: Path) -> Pair:
    return with_log(inspect_pair(folder), lambda log: log["samples"][0]["scores"]["match"].update(value=float("nan")))


@damage("no JSON", "write the log again")
def a_log_cut_short(folder: Path) -> Pair:
    pair = inspect_pair(folder)
    pair[1].write_bytes(pair[1].read_bytes()[:-100])
    return pair


@damage("no whole zip file", "write the log again")
def an_archive_cut_short(folder: Path) -> Pair:
    rows = [inspect_sample(n, "C") for n in range(5)]
    pair = write_inspect_eval(folder / "a.eval", rows), write_inspect_eval(folder / "b.eval", rows, run="run-b")
    pair[1].write_bytes(pair[1].read_bytes()[:-100])
    return pair


@damage("it has no header.json", "inspect eval-retry")
def an_archive_without_its_header(folder: Path) -> Pair:
    rows = [inspect_sample(n, "C") for n in range(5)]
    with zipfile.ZipFile(folder / "b.eval", "w") as archive:
        archive.writestr("summaries.json", "[]")
    return write_inspect_eval(folder / "a.eval", rows), folder / "b.eval"


@damage("both are the run run-a", "name two evaluations")
def a_copy_of_a_log(folder: Path) -> Pair:
    return inspect_pair(folder, run="run-a", model="mock/model")


@damage("it holds mock/model, other/model", "name the logs of one")
def logs_of_two_models(folder: Path) -> Pair:
    base, _ = inspect_pair(folder)
    write_inspect_json(folder / "logs" / "a.json", [inspect_sample(0, "C")], task="one")
    write_inspect_json(folder / "logs" / "b.json", [inspect_sample(0, "C")], task="two", model="other/model")
    return base, folder / "logs"


# ---------------------------------------------------------------- tables


def tables(folder: Path, *rows: dict[str, Any], suffix: str = ".jsonl") -> Pair:
    good = [{"task": "t", "id": n, "score": 1} for n in range(3)]
    return write_table(folder / f"base{suffix}", good), write_table(folder / f"candidate{suffix}", [*good, *rows])


@damage("line 4 has no score, but task, id", "name the columns task, id and score")
def a_table_without_a_score(folder: Path) -> Pair:
    return tables(folder, {"task": "t", "id": 3})


@damage("line 4 has 55", "divide by the largest possible score")
def a_score_in_percent(folder: Path) -> Pair:
    return tables(folder, {"task": "t", "id": 3, "score": 55})


@damage("line 5 has 'right'", "mend the row")
def a_score_in_words(folder: Path) -> Pair:
    return tables(folder, {"task": "t", "id": 3, "score": "right"}, suffix=".csv")


@damage("line 5 has 'nan'", "mend the row")
def a_score_that_is_nan_in_a_table(folder: Path) -> Pair:
    return tables(folder, {"task": "t", "id": 3, "score": "nan"}, suffix=".csv")


@damage("another number of cells than the header", "mend the row")
def a_line_with_a_cell_too_many(folder: Path) -> Pair:
    pair = tables(folder, suffix=".csv")
    pair[1].write_text(pair[1].read_text() + "t,4,1,9\n")
    return pair


@damage("its header is task, id, score, score", "name the columns task, id and score")
def a_column_twice(folder: Path) -> Pair:
    pair = tables(folder, suffix=".csv")
    pair[1].write_text("task,id,score,score\nt,0,1,0\n")
    return pair


@damage("it has none", "evaluate again")
def a_table_of_a_header_alone(folder: Path) -> Pair:
    pair = tables(folder, suffix=".csv")
    pair[1].write_text("task,id,score\n")
    return pair


@damage("line 2 has no task, but task;id;score", "name the columns task, id and score")
def a_table_with_semicolons(folder: Path) -> Pair:
    pair = tables(folder, suffix=".csv")
    pair[1].write_text("task;id;score\nt;0;1\n")
    return pair


@damage("id '2' stands 2 times", "keep one row for each item")
def an_id_twice_in_a_table(folder: Path) -> Pair:
    return tables(folder, {"task": "t", "id": 2, "score": 0})


@damage("line 4 is no JSON", "mend the row")
def a_table_cut_short(folder: Path) -> Pair:
    pair = tables(folder)
    pair[1].write_text(pair[1].read_text() + '{"task": "t", "id"')
    return pair


@damage("the key 'score' stands twice", "mend the row")
def a_score_twice_in_one_row(folder: Path) -> Pair:
    pair = tables(folder)
    pair[1].write_text(pair[1].read_text() + '{"task": "t", "id": 3, "score": 1, "score": 0}\n')
    return pair


@pytest.mark.parametrize("name", DAMAGES)
def test_it_ends_with_one_line_that_names_file_and_remedy(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, reason, remedy = DAMAGES[name]
    base, candidate = write(tmp_path)
    with pytest.raises(EmadError) as caught:
        compare_accuracy(base, candidate)
    message = str(caught.value)
    assert "\n" not in message
    assert reason in message
    assert remedy in message
    assert str(tmp_path) in message
    assert cli.main(["accuracy", str(base), str(candidate)]) == 4
    assert capsys.readouterr().err == f"emad: {message}\n"


def test_there_are_as_many_damages_as_the_readers_promise() -> None:
    assert len(DAMAGES) >= 45


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"margin": -0.01}, "margin=-0.01, but expected a fraction from 0 to 0.5"),
        ({"margin": 1}, "margin=1, but expected a fraction"),
        ({"margin": float("nan")}, "margin=nan"),
        ({"tasks": ["leters"]}, "--task='leters', but expected a task of both sides, or a pattern; nearest: letters"),
        ({"metrics": ["f1"]}, "--metric='f1'"),
        ({"cluster": "chapter"}, "no field 'chapter' in doc, but question, paragraph"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    base, candidate = write_choice_pair(tmp_path, 20)
    with pytest.raises(EmadError) as caught:
        compare_accuracy(base, candidate, **options)
    assert said in str(caught.value)
