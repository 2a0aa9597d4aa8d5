"""``report.json`` is read back as written, or refused with its file and a remedy."""

from __future__ import annotations

import json

import pytest

from emad_ref.errors import BadArgument
from pytest_emad.report.schema import REPORT_FILE, BadReport, read_report, read_reports
from tests.unit.report.sample_report import foreign_report, report, written


def test_what_was_written_is_read(tmp_path):
    for data in (report(), foreign_report(), report(later="unknown")):
        assert read_report(written(tmp_path, data)) == data
        assert read_report(tmp_path / REPORT_FILE) == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data | {"schema": 2}, "has schema=2, but this version reads 8 alone"),
        (lambda data: data | {"state": "complete"}, r"has sha256=.*, but its content gives .* was changed or cut"),
        (lambda data: {"benchmarks": [], "machine_info": {}}, "has format=None, but expected 'report'"),
        (lambda data: [], "has format=None, but expected 'report'"),
    ],
)
def test_another_report_is_refused_by_its_file_with_a_remedy(tmp_path, change, message):
    written(tmp_path, report(state="running"))
    stored = json.loads((tmp_path / REPORT_FILE).read_text(encoding="utf-8"))
    (tmp_path / REPORT_FILE).write_text(json.dumps(change(stored)), encoding="utf-8")
    with pytest.raises(
        BadReport, match=rf"^report='.*/report\.json' {message}.*; name a folder that `pytest --emad-rep"
    ):
        read_report(tmp_path)


def test_a_missing_report_says_what_writes_one(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadReport, match=r"No such file or directory.*pytest --emad-report DIR"):
            read_report(folder)


def test_folders_are_read_in_order_and_each_once(tmp_path):
    first, second = written(tmp_path / "a", report("one")), written(tmp_path / "b", report("two"))
    assert [found["models"][0]["name"] for found in read_reports([second, first])] == ["two", "one"]
    for folders in ([], [first, second, tmp_path / "b" / ".." / "a"]):
        with pytest.raises(BadArgument, match="at least one, each once"):
            read_reports(folders)
