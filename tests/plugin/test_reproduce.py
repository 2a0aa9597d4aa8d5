"""The whole plan in one command: every model judged once, what failed said, what was done kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from emad_ref.report.parts import DONE_FILE, finished_status
from pytest_emad import reproduce

SUITE = """
import pytest
from emad_ref.statistics.verdicts import Verdict

@pytest.mark.emad(claim="EMAD-E13")
def test_it(emad_record, emad_settings):
    (model,) = emad_settings.models
    outcome = "falsified" if model == "bad" else "survived"
    emad_record.claim(Verdict("EMAD-E13", model, outcome, 1.0, None, 1, 1.0, "1 = tied", False, "counted"))
    assert model != "failing"
"""


@pytest.fixture
def asked(tmp_path: Path):
    suite = tmp_path / "test_stub.py"
    suite.write_text(SUITE)

    def run(*models: str, budget: str = "smoke", executor: str = "here") -> int:
        out = ["--out", str(tmp_path / "out")]
        return reproduce.main([*models, *out, "--suites", str(suite), "--budget", budget, "--executor", executor])

    return run


def read(folder: Path) -> dict:
    return json.loads((folder / "out" / "summary.json").read_text())


def test_every_model_has_its_report_and_all_claims_one_table(asked, tmp_path, capsys):
    assert asked("one", "bad") == 0  # a falsified row that does not gate is a result
    found = read(tmp_path)
    verdicts = {claim["model"]: claim["verdict"] for claim in found["claims"]}
    assert verdicts == {"one": "survived", "bad": "falsified"}
    assert found["status"] == {"one": 0, "bad": 0}
    assert "EMAD-E13" in capsys.readouterr().out
    assert (tmp_path / "out" / "one" / "report.json").is_file()
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "# Verdicts on one, bad" in page
    assert page.index("## one") < page.index("## bad")


def test_what_is_done_is_not_judged_again_unless_asked_otherwise(asked, tmp_path, capsys):
    asked("one")
    stamp = (tmp_path / "out" / "one" / "test_stub" / "report.json").stat().st_mtime_ns
    assert asked("one", "two") == 0
    assert "one test_stub: judged before, status 0" in capsys.readouterr().out
    assert (tmp_path / "out" / "one" / "test_stub" / "report.json").stat().st_mtime_ns == stamp
    asked("one", budget="standard")
    assert (tmp_path / "out" / "one" / "test_stub" / "report.json").stat().st_mtime_ns != stamp


def test_a_worker_judges_as_this_process_does(asked, tmp_path):
    assert asked("one", "failing", executor="processes:1") == 1
    assert read(tmp_path)["status"] == {"one": 0, "failing": 1}
    assert (tmp_path / "out" / "one" / "report.json").is_file()


def test_a_report_that_was_damaged_since_is_made_again(asked, tmp_path, capsys):
    asked("one")
    (tmp_path / "out" / "one" / "test_stub" / "report.json").write_text("{")
    assert asked("one") == 0
    assert "judged before" not in capsys.readouterr().out
    assert len(read(tmp_path)["claims"]) == 1


@pytest.mark.parametrize("mark", ["", "{", "[]", '{"identity": 3}', "[" * 100_000])
def test_a_mark_that_was_damaged_since_stands_for_nothing(asked, tmp_path, capsys, mark):
    wanted = reproduce.unit_identity("one", "p", SimpleNamespace(budget="smoke", suites="s", data=None, device="cpu"))
    (tmp_path / DONE_FILE).write_text(mark)
    assert finished_status(tmp_path / DONE_FILE, wanted) is None
    (tmp_path / DONE_FILE).write_text(json.dumps({"identity": wanted, "status": "well"}))
    assert finished_status(tmp_path / DONE_FILE, wanted) is None
    (tmp_path / DONE_FILE).write_text(json.dumps({"identity": wanted, "status": 1}))
    assert finished_status(tmp_path / DONE_FILE, wanted) == 1


def test_a_place_that_cannot_be_written_to_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["one", "--out", "/dev/full"])
    assert stopped.value.code == 2
    assert "--out='/dev/full/one/log.txt', but expected a place that can be written to" in capsys.readouterr().err


def test_a_failing_test_is_status_one_and_takes_no_other_model_down(asked, tmp_path):
    assert asked("failing", "one") == 1
    assert read(tmp_path)["status"] == {"failing": 1, "one": 0}


def test_what_cannot_run_is_status_four_and_is_tried_again(tmp_path, capsys):
    arguments = ["one", "--out", str(tmp_path / "out"), "--suites", str(tmp_path), "--budget", "smoke"]
    assert reproduce.main(arguments) == 4  # an empty folder collects nothing
    assert "one: status 5, see log.txt" in capsys.readouterr().out
    assert not (tmp_path / "out" / "one" / "test_stub" / DONE_FILE).exists()
    assert not (tmp_path / "out" / "report.md").exists(), "there is nothing to show"


def test_models_whose_folders_would_collide_are_refused(asked):
    with pytest.raises(SystemExit):
        asked("a/b", "a-b")


def test_a_unit_of_another_commit_is_another(monkeypatch):
    chosen = SimpleNamespace(budget="smoke", suites="s", data=None, device="cpu")
    before = reproduce.unit_identity("one", "p", chosen)
    monkeypatch.setattr(reproduce, "commit", lambda: "another")
    assert reproduce.unit_identity("one", "p", chosen) != before
