"""``emad accuracy``: exit statuses, forms of output, arguments; and how its time grows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pytest_emad import cli
from tests.evaluation_folders import DATE, LATER, choice_row, paired_rights, write_choice_pair, write_lm_eval

FELL, KEPT, OPEN = (2000, 100, 10), (2000, 5, 5), (400, 8, 4)


def run(*words: str | Path) -> int:
    return cli.main(["accuracy", *map(str, words)])


@pytest.mark.parametrize(
    ("numbers", "words", "status"),
    [
        (FELL, [], 1),
        (KEPT, [], 0),
        (OPEN, [], 0),
        (OPEN, ["--inconclusive", "fail"], 1),
        (KEPT, ["--inconclusive", "fail"], 0),
        (FELL, ["--largest-drop", "10%"], 0),
        (FELL, ["--largest-drop", "0.1"], 0),
        (FELL, ["--items", "-1"], 4),
    ],
)
def test_the_exit_status_is_the_verdict(
    tmp_path: Path, numbers: tuple[int, int, int], words: list[str], status: int
) -> None:
    assert run(*write_choice_pair(tmp_path, *numbers), *words) == status


@pytest.mark.parametrize(("text", "margin"), [("1%", 0.01), ("0.5 %", 0.005), ("0.02", 0.02), ("0", 0.0)])
def test_a_margin_is_points_or_a_fraction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, margin: float
) -> None:
    run(*write_choice_pair(tmp_path, 120), "--largest-drop", text, "--json")
    assert json.loads(capsys.readouterr().out)["margin"] == pytest.approx(margin)


@pytest.mark.parametrize("text", ["1", "0.5", "-1%", "60%", "nan", "one", "1 point"])
def test_a_margin_that_may_mean_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert run(*write_choice_pair(tmp_path, 20), f"--largest-drop={text}") == 4
    expected = "but expected points such as 1%, at most 50%, or a fraction such as 0.01, below 0.5"
    assert expected in capsys.readouterr().err


def test_markdown_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    pair = write_choice_pair(tmp_path, *FELL)
    page = tmp_path / "pages" / "accuracy.html"
    for _ in range(2):  # the second run replaces the page
        assert run(*pair, "--markdown", "--html", page) == 1
    assert capsys.readouterr().out.startswith("### emad accuracy: FALSIFIED")
    assert "<title>Accuracy of two evaluations</title>" in page.read_text(encoding="utf-8")


def test_another_file_is_not_replaced_by_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<title>Mine</title>")
    assert run(*write_choice_pair(tmp_path, *KEPT), "--html", mine) == 4
    assert "it holds something else" in capsys.readouterr().err
    assert mine.read_text() == "<title>Mine</title>"


def test_tasks_are_named_by_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = []
    for name, date in (("base", DATE), ("candidate", LATER)):
        rows = [choice_row(n, {"acc": 1.0}) for n in range(10)]
        tasks = dict.fromkeys(("mmlu_law", "mmlu_art", "gsm8k"), rows)
        sides.append(write_lm_eval(tmp_path / name, tasks, model=name, date=date))
    run(*sides, "--task", "mmlu_*", "--json")
    assert [test["task"] for test in json.loads(capsys.readouterr().out)["tests"]] == ["mmlu_art", "mmlu_law"]


def test_the_time_grows_as_the_number_of_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """18 tasks of one group, as MMLU's, against a third of them: a quadratic step would take nine times as long."""
    seconds = {}
    for count in (1, 6, 18):  # the first imports what is needed
        sides = []
        for side, (name, date) in enumerate((("base", DATE), ("candidate", LATER))):
            tasks = {
                f"mmlu_{k}": [
                    choice_row(n, {"acc": score}, document=f"{k} {n} " + "some words of a question " * 12)
                    for n, score in enumerate(paired_rights(246, 7, 6, seed=k)[side])
                ]
                for k in range(count)
            }
            folder = tmp_path / f"{name} {count}"
            sides.append(write_lm_eval(folder, tasks, model=name, date=date, groups={"mmlu": list(tasks)}))
        began = time.process_time()  # other processes share the machine
        assert run(*sides) == 0
        seconds[count] = time.process_time() - began
        assert f"{count * 246:,}" in capsys.readouterr().out
    assert seconds[18] < 6 * seconds[6], seconds
