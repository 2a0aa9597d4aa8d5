"""Suites judged part by part: what one run says, whoever judges, whatever is killed, and times taken alone."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from emad_ref.report.parts import DONE_FILE
from emad_ref.report.schema import read_report
from pytest_emad import reproduce, subprocesses

HELPERS = """
import os, pytest, time
from pathlib import Path
from emad_ref.statistics.verdicts import Verdict

@pytest.fixture(autouse=True)
def noted(request):
    began = time.monotonic()
    time.sleep(0.5)
    yield
    Path(os.environ["EMAD_NOTED"], request.node.name).write_text(f"{began} {time.monotonic()}")

@pytest.fixture
def told(emad_record, emad_settings):
    (model,) = emad_settings.models
    def tell(claim):
        emad_record.point({"model": model, "name": "p", claim: 1.0})
        emad_record.note(f"of {claim}")
        emad_record.claim(Verdict(claim, model, "survived", 1.0, None, 1, 1.0, "1 = tied", False, "counted"))
    return tell
"""
FIRST = """
import pytest

@pytest.mark.emad(claim="EMAD-E13")
def test_first(told): told("EMAD-E13")
"""
SECOND = """
import os, pytest, signal
from pathlib import Path

@pytest.mark.emad(claim="EMAD-E1")
def test_second(told):
    flag = Path(os.environ["EMAD_NOTED"], "killed")
    if os.environ.get("EMAD_KILLS") and not flag.exists():
        flag.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()  # until somebody notices
    told("EMAD-E1")

@pytest.mark.emad(claim="EMAD-F2", measures=True)
def test_second_timed(told): told("EMAD-F2")

@pytest.mark.emad(budget="full")
def test_second_of_a_larger_budget(): pass
"""
THIRD = """
import pytest

@pytest.mark.emad(claim="EMAD-E7", budget="standard")
def test_third(told): told("EMAD-E7")

@pytest.mark.emad(claim="EMAD-N1", measures=True)
def test_third_timed(told): told("EMAD-N1")
"""
PARTS = ["a", "b-rest", "b-measuring", "c"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a folder of suites: one measures nothing, one some of it, one all that is asked of it."""
    for name in ("CI", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for file, text in {
        "conftest.py": HELPERS, "a/test_a.py": FIRST, "b/test_b.py": SECOND, "c/test_c.py": THIRD,
    }.items():  # fmt: skip
        (tmp_path / "suites" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "suites" / file).write_text(text)
    (tmp_path / "noted").mkdir()
    monkeypatch.setenv("EMAD_NOTED", str(tmp_path / "noted"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judged(*words: str) -> int:
    return reproduce.main(["m", "--out", "out", "--suites", "suites", "--budget", "smoke", *words])


def one_run(place: Path) -> Any:
    """The report of a pytest that is asked everything at once."""
    words = subprocesses.pytest_words(
        ["suites"], {"model": "m", "budget": "smoke", "device": "cpu", "report": place / "at-once"}
    )
    assert subprocesses.run_pytest(words, place / "at-once.txt") == 0
    return read_report(place / "at-once")


def test_parts_together_say_what_one_run_says_and_are_kept(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged() == 0
    found, wanted = read_report(place / "out" / "m"), one_run(place)
    assert list(found["run"]["parts"]) == PARTS
    for each in (
        "claims",
        "points",
        "notes",
        "models",
        "known",
        "audits",
        "goldens",
        "tables",
        "deselected",
        "waivers",
    ):
        assert found[each] == wanted[each], each
    assert found["decoder"] == wanted["decoder"]
    assert found["provenance"] == wanted["provenance"]
    assert found["settings"] | {"report": None} == wanted["settings"] | {"report": None}
    for each in ("state", "schema"):
        assert found[each] == wanted[each]
    for each in ("asked", "exit_status", "failures", "addopts", "claims_file", "project"):
        assert found["run"][each] == wanted["run"][each], each
    assert [test | {"duration_s": 0} for test in found["tests"]] == [
        test | {"duration_s": 0} for test in wanted["tests"]
    ]
    assert {path.name for path in (place / "out" / "m").iterdir()} >= {"report.md", "parts.json", "log.txt", *PARTS}

    capsys.readouterr()  # a run that was killed in the middle goes on with what it had not finished
    stamps = {part: (place / "out" / "m" / part / DONE_FILE).stat().st_mtime_ns for part in PARTS}
    (place / "out" / "m" / "b-measuring" / DONE_FILE).unlink()
    assert judged() == 0
    again = [part for part in PARTS if (place / "out" / "m" / part / DONE_FILE).stat().st_mtime_ns != stamps[part]]
    assert again == ["b-measuring"]
    assert capsys.readouterr().out.count("judged before, status 0") == len(PARTS) - 1

    report = place / "out" / "m" / "c" / "report.json"  # what is of another version is no part of it
    other = json.loads(report.read_text())
    report.write_text(json.dumps(other | {"provenance": other["provenance"] | {"commit": "another"}}))
    assert judged() == 4
    assert "m: a and c are parts of one report, but commit is" in capsys.readouterr().out


@pytest.mark.slow
def test_what_measures_is_alone_and_a_killed_worker_costs_its_unit_only(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMAD_KILLS", "1")
    assert judged("--executor", "processes:2") == 0
    assert (place / "noted" / "killed").exists()
    noted = {path.name: path.read_text().split() for path in (place / "noted").iterdir() if path.stat().st_size}
    spans = {name: (float(began), float(ended)) for name, (began, ended) in noted.items()}
    timed = {name: span for name, span in spans.items() if "timed" in name}
    rest = {name: span for name, span in spans.items() if "timed" not in name}
    assert (len(timed), len(rest)) == (2, 2)
    assert min(began for began, _ in timed.values()) > max(ended for _, ended in rest.values())
    (_, before), (after, _) = sorted(timed.values())
    assert after > before, "one at a time"
    monkeypatch.delenv("EMAD_KILLS")
    found, wanted = read_report(place / "out" / "m"), one_run(place)
    for each in ("claims", "points", "notes", "deselected"):
        assert found[each] == wanted[each], each


def test_installed_suites_are_cut_by_their_folders(wheel_layout: Path, project: pytest.Pytester) -> None:
    words = ["--out", "out", "--suites", "pytest_emad.suites", "--budget", "smoke", "m"]
    done = project.run(sys.executable, "-m", "pytest_emad.reproduce", *words)
    assert done.ret == 0, done.outlines
    found = read_report(project.path / "out" / "m")
    assert list(found["run"]["parts"]) == ["claims", "cost"]
    assert found["run"]["asked"] == ["suites"]
    assert len(found["tests"]) == 2


@pytest.mark.slow
def test_whoever_is_killed_leaves_nobody_at_work(place: Path) -> None:
    """A pytest ends with the process that waits for it: what is resumed finds its folder to itself."""
    waiting = (
        "import os; from pathlib import Path; from pytest_emad import subprocesses\n"
        "apart.status(['waiting.py'], Path('waiting.txt'))"
    )
    (place / "waiting.py").write_text(
        "import os, time\ndef test(): open(f'waits-{os.getpid()}', 'w').close(); time.sleep(60)"
    )
    started = os.posix_spawn(sys.executable, [sys.executable, "-c", waiting], os.environ)
    while not (found := list(place.glob("waits-*"))):
        time.sleep(0.1)
    os.kill(started, 9)
    os.waitpid(started, 0)
    for _ in range(100):
        if not Path("/proc", found[0].name.removeprefix("waits-")).exists():
            return
        time.sleep(0.1)
    pytest.fail("it is still at work")
