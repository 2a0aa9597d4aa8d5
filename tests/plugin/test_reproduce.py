"""The command that judges a list of models: one pytest each, resuming, workers, exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emad_ref.workers import child_process
from pytest_emad import reproduce
from pytest_emad.report.schema import REPORT_FILE, STARTED_FILE, read_report
from tests.unit.report.sample_report import foreign_report, written
from tests.unit.workers.test_child_process import gone

SUITE = """
import pytest
from pytest_emad.statistics.verdicts import Verdict

@pytest.mark.emad(claim="EMAD-E13")
def test_it(emad_record, emad_settings):
    (model,) = emad_settings.models
    outcome = "falsified" if model == "bad" else "survived"
    emad_record.record_claim(Verdict("EMAD-E13", model, outcome, 1.0, None, 1, 1.0, "1 = tied", "counted"))
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


def test_a_finished_report_is_reused_until_the_command_line_changes(asked, tmp_path, capsys):
    asked("one")
    stamp = (tmp_path / "out" / "one" / "report.json").stat().st_mtime_ns
    assert asked("one", "two") == 0
    assert "one: judged before, status 0" in capsys.readouterr().out
    assert (tmp_path / "out" / "one" / "report.json").stat().st_mtime_ns == stamp
    asked("one", budget="standard")
    assert (tmp_path / "out" / "one" / "report.json").stat().st_mtime_ns != stamp
    assert read_report(tmp_path / "out" / "one")["settings"]["budget"] == "standard"


class Runs:
    """Replaces processes: each run exits with the next of ``statuses`` and writes nothing."""

    def __init__(self, *statuses: int):
        self.left, self.words = list(statuses), list[tuple[str, ...]]()

    def __call__(self, module: str, words: tuple[str, ...], log: Path, *, folder: Path) -> int:
        assert (module, log.name, folder) == ("pytest", reproduce.LOG_FILE, Path.cwd())
        self.words.append(words)
        return self.left.pop(0)


UNIT = reproduce.JudgedModel("m", False, ("suites",), Path("m"), Path("start"), ("0.2", "abc"))


def reported(folder: Path, **changed: Any) -> None:
    """Write the finished report of ``UNIT``, with other values of some keys of ``run``, or of the whole."""
    report = foreign_report()
    run = report["run"] | {"command": ["pytest", *UNIT.words], "exit_status": 1}
    origin = {"versions": {reproduce.DISTRIBUTION: UNIT.origin[0]}, "commit": UNIT.origin[1]}
    whole = report | {"state": "complete", "run": run, "provenance": report["provenance"] | origin}
    for key, value in changed.items():
        (whole if key in whole else run)[key] = value
    written(folder, whole)


def test_a_unit_with_a_finished_report_is_not_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = replace(UNIT, folder=tmp_path)
    monkeypatch.setattr(child_process, "run_module_for_status", runs := Runs(4))
    reported(tmp_path)
    assert unit.run_or_reuse() == 1
    assert not runs.words
    for other in ({"words": ("other",)}, {"origin": ("0.3", "abc")}, {"origin": ("0.2", None)}):
        assert replace(unit, **other).finished_report() is None


@pytest.mark.parametrize("damage", [{"state": "interrupted"}, {"exit_status": 4}, {"command": ["pytest"]}])
def test_a_report_of_no_finished_run_is_made_again(damage: dict[str, Any], tmp_path: Path, monkeypatch) -> None:
    reported(tmp_path, **damage)
    monkeypatch.setattr(child_process, "run_module_for_status", runs := Runs(0))
    assert replace(UNIT, folder=tmp_path, start=Path.cwd()).run_or_reuse() == 0
    assert runs.words == [UNIT.words]


def test_a_report_that_is_broken_or_whose_next_run_was_killed_stands_for_nothing(tmp_path: Path, capsys) -> None:
    reported(tmp_path)
    (tmp_path / STARTED_FILE).write_text("2026-01-01T00:00:00")
    assert replace(UNIT, folder=tmp_path).finished_report() is None
    (tmp_path / STARTED_FILE).unlink()
    (tmp_path / REPORT_FILE).write_text("{")
    assert replace(UNIT, folder=tmp_path).finished_report() is None
    assert "it is judged again" in capsys.readouterr().out


def test_a_run_that_ends_well_without_a_report_is_not_judged(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "run_module_for_status", Runs(0))
    assert asked("one") == 4
    assert read(tmp_path)["status"] == {"one": 4}


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
    for _ in range(2):
        assert reproduce.main(arguments) == 4  # an empty folder collects nothing
        said = capsys.readouterr().out
        assert "one: status 5, see log.txt" in said
        assert "judged before" not in said
    assert not (tmp_path / "out" / "report.md").exists(), "there is nothing to show"


def test_models_whose_folders_would_collide_are_refused(asked):
    with pytest.raises(SystemExit):
        asked("a/b", "a-b")


def test_names_of_models_are_folders() -> None:
    assert [reproduce.model_folder_name(name) for name in ("emad-tiny", "EleutherAI/pythia-410m@main", "./x", "…")] == [
        "emad-tiny", "EleutherAI-pythia-410m-main", "x", "model",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([0, 0], 0), ([1, 0], 1), ([0, 5], 0), ([5, 1], 1), ([5, 5], 5), ([1, 4], 4), ([2, 1], 2), ([0], 0)],
)
def test_the_status_of_a_model_is_the_worst_of_its_units(statuses: list[int], expected: int) -> None:
    assert reproduce.model_status(statuses) == expected


HELPERS = """
import os, pytest, time
from pathlib import Path
from pytest_emad.statistics.verdicts import Verdict

@pytest.fixture(autouse=True)
def noted(request, emad_settings):
    began = time.monotonic()
    time.sleep(0.5)  # overlapping tests would be seen
    yield
    name = f"{request.node.name}-{emad_settings.models[0]}"
    Path(os.environ["EMAD_NOTED"], name).write_text(f"{began} {time.monotonic()}")

@pytest.fixture
def told(emad_record, emad_settings):
    (model,) = emad_settings.models
    def tell(claim):
        emad_record.record_claim(Verdict(claim, model, "survived", 1.0, None, 1, 1.0, "1 = tied", "counted"))
    return tell
"""
BOTH = """
import os, pytest, signal
from pathlib import Path

@pytest.mark.emad(claim="EMAD-E1")
def test_counted(told, emad_settings):
    flag = Path(os.environ["EMAD_NOTED"], "killed")
    if os.environ.get("EMAD_KILLS") and emad_settings.models[0] == "m" and not flag.exists():
        flag.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()  # this process ends when it sees that the worker is dead
    told("EMAD-E1")

@pytest.mark.emad(claim="EMAD-F2", measures=True)
def test_timed(told): told("EMAD-F2")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of suites with a test that measures and one that does not."""
    for name in ("CI", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/conftest.py").write_text(HELPERS)
    (tmp_path / "suites/test_both.py").write_text(BOTH)
    (tmp_path / "noted").mkdir()
    monkeypatch.setenv("EMAD_NOTED", str(tmp_path / "noted"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_process_judges_a_model_in_one_pytest(place: Path) -> None:
    assert reproduce.main(["m", "--out", "out", "--suites", "suites", "--budget", "smoke"]) == 0
    found = read_report(place / "out" / "m")
    assert [claim["id"] for claim in found["claims"]] == ["EMAD-E1", "EMAD-F2"]
    assert not (place / "out" / "m" / "measuring").exists()


@pytest.mark.slow
def test_tests_that_measure_run_last_and_a_killed_worker_costs_its_unit_only(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("distributed", reason="extra cluster")
    monkeypatch.setenv("EMAD_KILLS", "1")
    words = ["m", "n", "--out", "out", "--suites", "suites", "--budget", "smoke", "--executor", "processes:2"]
    assert reproduce.main(words) == 0
    assert (place / "noted" / "killed").exists()
    noted = {path.name: path.read_text().split() for path in (place / "noted").iterdir() if path.stat().st_size}
    spans = {name: (float(began), float(ended)) for name, (began, ended) in noted.items()}
    timed = [span for name, span in spans.items() if "timed" in name]
    rest = [span for name, span in spans.items() if "counted" in name]
    assert (len(timed), len(rest)) == (2, 2)
    assert min(began for began, _ in timed) > max(ended for _, ended in rest)
    (_, before), (after, _) = sorted(timed)
    assert after > before, "one at a time"
    for model in ("m", "n"):
        (counted,), (measured,) = (
            read_report(place / "out" / model / folder)["claims"] for folder in ("", "measuring")
        )
        assert (counted["id"], measured["id"]) == ("EMAD-E1", "EMAD-F2")
    assert [claim["model"] for claim in read(place)["claims"]] == ["m", "n", "m", "n"]
    capsys.readouterr()
    assert reproduce.main(words) == 0
    assert capsys.readouterr().out.count("judged before, status 0") == 4


@pytest.mark.slow
def test_installed_suites_are_judged_by_their_package_name(wheel_layout: Path, project: pytest.Pytester) -> None:
    words = ["--out", "out", "--suites", "pytest_emad.suites", "--budget", "smoke", "random:pythia-70m"]
    done = project.run(sys.executable, "-m", "pytest_emad.reproduce", *words)
    assert done.ret == 0, done.outlines
    (written,) = (project.path / "out").glob("*/report.json")
    found = read_report(written.parent)
    assert found["run"]["asked"] == ["suites"]
    assert len(found["tests"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["here", "processes:2"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_suites_end_with_the_command_that_started_them(place: Path, executor: str, number: signal.Signals) -> None:
    """A resumed command then finds no other process in its folder. Ctrl-C reaches the whole group."""
    if executor != "here":
        pytest.importorskip("distributed", reason="extra cluster")
    (place / "suites/test_both.py").write_text(
        "import os, time\ndef test(): open(f'waits-{os.getpid()}', 'w').close(); time.sleep(60)"
    )
    words = ["m", "n", "--out", "out", "--suites", "suites", "--budget", "smoke", "--executor", executor]
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{hears}; from pytest_emad import reproduce; raise SystemExit(reproduce.main({words}))"
    expected = 1 if executor == "here" else 2
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as started:
        while len(found := list(place.glob("waits-*"))) < expected:
            assert started.poll() is None, "it ended before its suites began"
            time.sleep(0.1)
        os.killpg(started.pid, number)
        assert started.wait(60) == -number
    assert all(gone(int(path.name.removeprefix("waits-"))) for path in found)
