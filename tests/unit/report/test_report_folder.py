"""The report folder: its files, their names, and messages about files that are left out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from emad_ref.files import write_atomically
from pytest_emad.report import page
from pytest_emad.report.page import WrittenPages, render_figures_and_remark, write_pages
from tests.unit.report.sample_report import PARETO, report

FIGURE = {"title": "equal FLOPs", "model": "m", "rows": PARETO, "figure": "pareto"}
UNCOUNTED = {
    "title": "cost",
    "model": "m",
    "rows": [{"decoding": "foreign", "score": 0.5, "MFLOPs per token": None}],
    "figure": "score against cost",
}


@pytest.fixture
def extra():
    for module in ("matplotlib", "jinja2"):
        pytest.importorskip(module, reason="the extra `report` is not installed")


def names(path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_a_folder_holds_document_page_and_figures(extra, tmp_path):
    written = write_pages([report()], tmp_path)
    assert names(tmp_path) == {"report.md", "index.html", "m-pareto.svg"} == set(written.files)
    assert str(written) == "report.md, index.html, 1 figure"
    assert (tmp_path / "m-pareto.svg").read_text().startswith("<?xml")
    assert "![m: equal FLOPs](m-pareto.svg)" in (tmp_path / "report.md").read_text()
    assert "<svg" in (tmp_path / "index.html").read_text()


def test_the_same_report_gives_the_same_files(extra, tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    for path in (first, second):
        path.mkdir()
        write_pages([report(), report("other")], path)
    assert names(first) == names(second)
    for name in names(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_figures_have_names_of_their_own(extra):
    tables = [FIGURE, FIGURE | {"title": "again"}, FIGURE | {"model": "a/b"}, FIGURE | {"model": "a b"}, UNCOUNTED]
    reports = [report(points=[], tables=tables) for tables in (tables, [FIGURE | {"model": "…"}])]
    (first, second), remark = render_figures_and_remark(reports)
    assert [first[number].file for number in range(len(tables))] == [
        *("m-pareto.svg", "m-pareto-2.svg", "a-b-pareto.svg", "a-b-pareto-2.svg"),
        "",
    ]
    assert first[4].absent == "no row has MFLOPs per token"
    assert second[0].file == "model-pareto.svg"
    assert remark == ""


def test_without_matplotlib_the_rest_is_written_and_says_so(monkeypatch, tmp_path):
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    written = write_pages([report()], tmp_path)
    assert names(tmp_path) == {"report.md", "index.html"}
    (reason,) = written.left_out
    assert reason.startswith("no figures: ")
    assert "pip install 'pytest-emad[report]'" in reason
    assert "no figures: " in (tmp_path / "report.md").read_text()
    assert "no figures: " in (tmp_path / "index.html").read_text()
    assert str(written) == f"report.md, index.html; {reason}; `emad report` makes them from report.json later"


def test_without_jinja_no_page_is_left_that_tells_of_another_report(monkeypatch, tmp_path):
    (tmp_path / "index.html").write_text("an earlier run")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    written = write_pages([report(tables=[])], tmp_path)
    assert names(tmp_path) == {"report.md"}
    assert [reason.split(":")[0] for reason in written.left_out] == ["no index.html"]


def test_a_report_without_figures_needs_no_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plain = {"title": "probe stride", "model": "m", "rows": [{"stride": 2}]}
    assert render_figures_and_remark([report(points=[], tables=[plain])]) == ([{}], "")


def test_letters_that_no_file_can_hold_are_replaced(extra, tmp_path):
    write_pages([report(notes=["red \x1b[31m and half \ud800"])], tmp_path)
    for name in ("report.md", "index.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "\x1b" not in text
        assert "half \ufffd" in text


def test_nothing_is_left_half_written(extra, monkeypatch, tmp_path):
    (tmp_path / "report.md").write_text("old")

    def breaks(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", breaks)
    with pytest.raises(OSError, match="No space"):
        write_pages([report(tables=[])], tmp_path)
    assert names(tmp_path) == {"report.md"}
    assert (tmp_path / "report.md").read_text() == "old"


def test_what_is_written_can_be_read_by_others(tmp_path):
    write_atomically(tmp_path / "x", "text")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


def test_figures_are_counted_apart_from_pages():
    assert str(WrittenPages(("a.svg", "b.svg", "report.md"))) == "report.md, 2 figures"
    assert str(WrittenPages(("report.md",))) == "report.md"


def test_reports_need_neither_a_model_nor_torch():
    code = (
        "import sys, pytest_emad.report.page, pytest_emad.report.schema, pytest_emad.cli\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert page.MARKDOWN_FILE == "report.md"


def test_changes_that_are_given_reach_the_page(tmp_path):
    write_pages([report()], tmp_path, [{"claim": "EMAD-F1", "before": "survived", "now": "falsified"}])
    assert "What changed" in (tmp_path / "index.html").read_text(encoding="utf-8")
