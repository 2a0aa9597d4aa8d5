"""The command that judges a list of models: units, resuming, workers, exit status."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_emad import reproduce
from pytest_emad.report.schema import read_report
from pytest_emad.report.suite_parts import DONE_FILE, read_reusable_exit_status
from pytest_emad.run import subprocesses

SUITE = """
import pytest
from pytest_emad.statistics.verdicts import Verdict

@pytest.mark.emad(claim="EMAD-E13")
def test_it(emad_record, emad_settings):
    (model,) = emad_settings.models
    outcome = "falsified" if model == "bad" else "survived"
    emad_record.record_claim(Verdict("EMAD-E13", model, outcome, 1.0, None, 1, 1.0, "1 = tied", False, "counted"))
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
    wanted = reproduce.suite_part_reuse_key(
        "one", "p", SimpleNamespace(budget="smoke", suites="s", data=None, device="cpu")
    )
    (tmp_path / DONE_FILE).write_text(mark)
    assert read_reusable_exit_status(tmp_path / DONE_FILE, wanted) is None
    (tmp_path / DONE_FILE).write_text(json.dumps({"identity": wanted, "status": "well"}))
    assert read_reusable_exit_status(tmp_path / DONE_FILE, wanted) is None
    (tmp_path / DONE_FILE).write_text(json.dumps({"identity": wanted, "status": 1}))
    assert read_reusable_exit_status(tmp_path / DONE_FILE, wanted) == 1


def test_a_place_that_cannot_be_written_to_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["one", "--out", "/dev/full"])
    assert stopped.value.code == 2
    assert "--out='/dev/full/one/log.txt', but expected a place that can be written to" in capsys.readouterr().err


@pytest.mark.parametrize("own", ["summary.json", "report.md", "one/report.json"])
def test_a_file_of_another_kind_is_not_replaced(asked, tmp_path, capsys, own):
    file = tmp_path / "out" / own
    file.parent.mkdir(parents=True)
    file.write_text("my notes")
    with pytest.raises(SystemExit):
        asked("one")
    assert f"{own}', but expected a new file, or " in capsys.readouterr().err
    assert file.read_text() == "my notes"


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
    before = reproduce.suite_part_reuse_key("one", "p", chosen)
    monkeypatch.setattr(reproduce, "package_git_commit", lambda: "another")
    assert reproduce.suite_part_reuse_key("one", "p", chosen) != before


HELPERS = """
import os, pytest, time
from pathlib import Path
from pytest_emad.statistics.verdicts import Verdict

@pytest.fixture(autouse=True)
def noted(request):
    began = time.monotonic()
    time.sleep(0.5 if "EMAD_KILLS" in os.environ else 0)  # overlapping tests would be seen
    yield
    Path(os.environ["EMAD_NOTED"], request.node.name).write_text(f"{began} {time.monotonic()}")

@pytest.fixture
def told(emad_record, emad_settings):
    (model,) = emad_settings.models
    def tell(claim):
        emad_record.record_point({"model": model, "name": "p", claim: 1.0})
        emad_record.record_note(f"of {claim}")
        emad_record.record_claim(Verdict(claim, model, "survived", 1.0, None, 1, 1.0, "1 = tied", False, "counted"))
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
        supervisor = Path("/proc", str(os.getppid()), "stat").read_text()
        worker = int(supervisor.rpartition(")")[2].split()[1])
        os.kill(worker, signal.SIGKILL)
        signal.pause()  # this process ends when it sees that the worker is dead
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
    """Return a folder of suites: one measures nothing, one a part, one everything."""
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
    """Return the report of one pytest run of everything."""
    words = subprocesses.build_pytest_arguments(
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

    capsys.readouterr()  # a killed run resumes with its unfinished units
    stamps = {part: (place / "out" / "m" / part / DONE_FILE).stat().st_mtime_ns for part in PARTS}
    (place / "out" / "m" / "b-measuring" / DONE_FILE).unlink()
    assert judged() == 0
    again = [part for part in PARTS if (place / "out" / "m" / part / DONE_FILE).stat().st_mtime_ns != stamps[part]]
    assert again == ["b-measuring"]
    assert capsys.readouterr().out.count("judged before, status 0") == len(PARTS) - 1

    report = place / "out" / "m" / "c" / "report.json"  # a report of another version is ignored
    other = json.loads(report.read_text())
    report.write_text(json.dumps(other | {"provenance": other["provenance"] | {"commit": "another"}}))
    assert judged() == 4
    assert "m: a and c are parts of one report, but commit is" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the suite finds the worker above its supervisor in /proc")
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
    words = ["--out", "out", "--suites", "pytest_emad.suites", "--budget", "smoke", "random:pythia-70m"]
    done = project.run(sys.executable, "-m", "pytest_emad.reproduce", *words)
    assert done.ret == 0, done.outlines
    (written,) = (project.path / "out").glob("*/report.json")
    found = read_report(written.parent)
    assert list(found["run"]["parts"]) == ["claims", "cost"]
    assert found["run"]["asked"] == ["suites"]
    assert len(found["tests"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the process in /proc")
def test_a_suite_ends_when_the_command_that_started_it_is_killed(place: Path) -> None:
    """A resumed command then finds no other process in its folder."""
    waiting = (
        "from pathlib import Path; from pytest_emad import subprocesses\n"
        "subprocesses.run_pytest(['waiting.py'], Path('waiting.txt'))"
    )
    (place / "waiting.py").write_text(
        "import os, time\ndef test(): open(f'waits-{os.getpid()}', 'w').close(); time.sleep(60)"
    )
    started = os.posix_spawn(sys.executable, [sys.executable, "-c", waiting], os.environ)
    while not (found := list(place.glob("waits-*"))):
        assert os.waitpid(started, os.WNOHANG) == (0, 0), "it ended before its suite began"
        time.sleep(0.1)
    os.kill(started, 9)
    os.waitpid(started, 0)
    for _ in range(100):
        if not Path("/proc", found[0].name.removeprefix("waits-")).exists():
            return
        time.sleep(0.1)
    pytest.fail("the suite still runs")
