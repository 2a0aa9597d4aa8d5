"""A comparison as frames, JSON, text, Markdown and a page; and the items that a reader learns most from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import pytest_emad
from pytest_emad.accuracy.comparison import AccuracyComparison, compare_accuracy
from pytest_emad.accuracy.differing_items import list_differing_items
from pytest_emad.accuracy.page import MOST_ITEMS, render_accuracy_page
from pytest_emad.accuracy.summary import format_comparison_pull_request, format_comparison_summary
from tests.evaluation_folders import (
    DATE,
    LATER,
    choice_row,
    generated_row,
    paired_rights,
    write_choice_pair,
    write_lm_eval,
)


@pytest.fixture
def comparison(tmp_path: Path) -> AccuracyComparison:
    """A group of two tasks that fell, and a task with a metric over all items that kept its accuracy."""
    sides = []
    scores = {"a": paired_rights(500, 40, 8), "b": paired_rights(300, 20, 2, seed=1), "c": paired_rights(900, 1, 2)}
    for side, (name, date) in enumerate((("base", DATE), ("candidate", LATER))):
        tasks = {
            task: [
                choice_row(n, {"acc": score, **({"mcc": [1, 0]} if task == "c" else {})}, document=f"{task}|<{n}>")
                for n, score in enumerate(both[side])
            ]
            for task, both in scores.items()
        }
        groups = {"both": ["a", "b"]}
        sides.append(write_lm_eval(tmp_path / name, tasks, model=f"{name}-model", date=date, groups=groups))
    return compare_accuracy(*sides)


def test_the_function_is_a_name_of_the_package() -> None:
    assert pytest_emad.compare_accuracy is compare_accuracy


def test_frames_have_a_row_for_each_test_part_item_and_omission(comparison: AccuracyComparison) -> None:
    pytest.importorskip("pandas", reason="the extra `report` is not installed")
    tasks = comparison.tasks.set_index("test")
    assert list(tasks.index) == ["c", "both"]
    assert tasks.loc["both", ["verdict", "items", "lost", "gained"]].tolist() == ["falsified", 800, 60, 10]
    assert tasks.loc["both", "low"] < tasks.loc["both", "drop"] < tasks.loc["both", "high"]
    assert comparison.parts[["group", "task", "verdict"]].values.tolist() == [
        ["both", "a", "measured"],
        ["both", "b", "measured"],
    ]
    assert len(comparison.items) == 73
    assert set(comparison.items["change"]) == {"lost", "gained"}
    assert comparison.left_out[["subject", "count"]].values.tolist() == [["c: mcc (both sides)", 900]]


def test_json_has_built_in_types_and_the_first_items(comparison: AccuracyComparison) -> None:
    found = json.loads(json.dumps(comparison.to_json(items=4), allow_nan=False))
    assert (found["format"], found["schema"], found["verdict"]) == ("accuracy", 1, "falsified")
    assert [test["test"] for test in found["tests"]] == ["c", "both"]
    assert [part["task"] for part in found["tests"][1]["parts"]] == ["a", "b"]
    assert (found["differing_items"], len(found["items"])) == (73, 4)
    assert found["base"]["model"] == "base-model"


def test_the_text_of_a_terminal_has_a_line_for_each_task_then_the_verdict(comparison: AccuracyComparison) -> None:
    text = format_comparison_summary(comparison, 130, 2)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 130
    assert lines[0].startswith("base: ")
    assert lines[0].endswith("(lm-eval, base-model)")
    table = [line.split() for line in lines[3:7]]
    assert table[0][:2] == ["task", "items"]
    assert table[2][0] == "c"
    assert table[2][-1] == "survived"
    assert table[3][0] == "both"
    assert table[3][-1] == "falsified"
    assert "FALSIFIED: accuracy falls by at most 1 point (1 falsified, 1 survived)" in text
    assert "c: mcc (both sides): no number per item (900)" in text
    assert "61 items lost, 12 gained; the first 2:" in text
    assert "1. lost: a, id" in text


def test_a_group_of_many_tasks_shows_the_worst_ten(tmp_path: Path) -> None:
    sides = []
    for side, (name, date) in enumerate((("base", DATE), ("candidate", LATER))):
        tasks = {
            f"t{k}": [
                choice_row(n, {"acc": score}, document=f"{k} {n}")
                for n, score in enumerate(paired_rights(40, k, 0)[side])
            ]
            for k in range(14)
        }
        groups = {"all": list(tasks)}
        sides.append(write_lm_eval(tmp_path / name, tasks, model=name, date=date, groups=groups))
    comparison = compare_accuracy(*sides)
    text = format_comparison_summary(comparison, 140, 0)
    assert "the 10 of 14 that fell the most, --json and --html have all" in text
    assert "\nt13 " in text
    assert "\nt3 " not in text
    assert "| t3 " in format_comparison_pull_request(comparison, 0)


def test_markdown_takes_no_text_of_an_item_for_its_own(comparison: AccuracyComparison) -> None:
    text = format_comparison_pull_request(comparison, 3)
    assert text.startswith("### emad accuracy: FALSIFIED: accuracy falls by at most 1 point")
    assert "a\\|&lt;" in text
    assert "a|<" not in text
    assert text.count("<details>") == text.count("</details>") == 3


def test_the_page_needs_no_other_file_and_escapes_texts(comparison: AccuracyComparison) -> None:
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    page = render_accuracy_page(comparison)
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert "a|&lt;" in page
    assert "a|<" not in page
    assert page.count('<section class="note">') == 73
    body = page[page.index("<body>") : page.index("</body>") + len("</body>")]
    ElementTree.fromstring(body)  # every element is closed


def test_the_page_shows_so_many_items_and_says_how_many_there_are(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    page = render_accuracy_page(compare_accuracy(*write_choice_pair(tmp_path, 900, 200, 50)))
    assert page.count('<section class="note">') == MOST_ITEMS
    assert "250 items have another score; the first 200 are shown, the most instructive first." in page


def test_the_first_items_show_every_task_and_both_changes(comparison: AccuracyComparison) -> None:
    first = [(item.task, item.change) for item in list_differing_items(comparison.tests)[:6]]
    assert first == [("a", "lost"), ("a", "gained"), ("b", "lost"), ("b", "gained"), ("c", "lost"), ("c", "gained")]


def test_a_scorer_that_changed_and_large_swings_come_first(tmp_path: Path) -> None:
    sides = []
    for name, date, score in (("base", DATE, 1.0), ("candidate", LATER, 0.0)):
        rows = [generated_row(n, {"exact_match": score}, filter="none") for n in range(3)]
        if name == "candidate":
            rows[1] |= {"filtered_resps": ["14"], "resps": [["It is 14."]]}  # the same answer, and no longer right
        choices = [choice_row(n, {"acc": score}) for n in range(3)]
        if name == "base":
            choices[2]["filtered_resps"][1] = ["-0.01", "False"]
        sides.append(write_lm_eval(tmp_path / name, {"sums": rows, "letters": choices}, model=name, date=date))
    items = compare_accuracy(*sides).differing_items
    assert [(item.task, item.id) for item in items[:2]] == [("letters", "2"), ("sums", "1")]
    assert items[0].lead_change == pytest.approx(-0.5 - 1.99)
    assert items[1].has_equal_answers


def test_two_metrics_of_one_item_show_it_once(tmp_path: Path) -> None:
    sides = []
    for name, date, score in (("base", DATE, 1.0), ("candidate", LATER, 0.0)):
        rows = [choice_row(n, {"acc": score, "acc_norm": score}) for n in range(5)]
        sides.append(write_lm_eval(tmp_path / name, {"t": rows}, model=name, date=date))
    comparison = compare_accuracy(*sides)
    assert [test.name for test in comparison.tests] == ["t (acc)", "t (acc_norm)"]
    assert len(comparison.differing_items) == 5


def test_repr_and_a_notebook_name_the_verdict(comparison: AccuracyComparison) -> None:
    assert repr(comparison).startswith("AccuracyComparison(falsified: accuracy falls by at most 1 point; ")
    assert "<td>survived</td>" in comparison._repr_html_()


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    base, candidate = write_choice_pair(tmp_path, 400, 5, 5)
    program = f"""
import sys
from pytest_emad import cli, compare_accuracy
assert cli.main(["accuracy", {str(base)!r}, {str(candidate)!r}, "--html", {str(tmp_path / "page.html")!r}]) == 0
compare_accuracy({str(base)!r}, {str(candidate)!r}).tasks
print({{"torch", "transformers", "lm_eval", "datasets"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
