"""``report.json`` describes the run itself: its state, every test, every audit, and what was left out."""

from __future__ import annotations

import hashlib
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pytest_emad import cli
from pytest_emad.report.schema import read_report
from pytest_emad.run import environment
from tests.plugin.conftest import RECORDED, Run, report_of
from tests.unit.report import sample_report

USAGE, INTERRUPTED = pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED
EARLIER = sample_report.report(earlier=True)


@pytest.fixture
def suites(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the plugin takes for its own suites."""
    folder = project.path / "suites" / "invariants"
    folder.mkdir(parents=True)
    (folder.parent / "conftest.py").write_text(RECORDED)
    monkeypatch.setattr(environment, "SUITES", (project.path / "suites",))
    return folder


def earlier(project: pytest.Pytester, report: dict[str, Any] = EARLIER) -> Path:
    """Put a report of an earlier run where the next one writes; returns its folder."""
    return sample_report.written(project.path / "out", report)


def test_a_report_holds_the_run_and_every_test(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(
        """
        import pytest
        def test_good(): pass
        def test_bad(): assert 1 == 2
        @pytest.fixture
        def broken(): raise RuntimeError("no room")
        def test_error(broken): pass
        @pytest.mark.skip(reason="not today")
        def test_skipped(): pass
        @pytest.mark.xfail(reason="known")
        def test_xfailed(): assert False
        @pytest.mark.xfail(reason="known")
        def test_xpassed(): pass
        def test_left_out(): pass
        """
    )
    (project.path / "claims.toml").write_text("[EMAD-F1]\ngate = false\n")
    before = datetime.now(UTC).replace(microsecond=0)
    result = run("--emad-report", "out", "-k", "not left_out", "--emad-register", "claims.toml")
    report = read_report(project.path / "out")
    tests = {entry["nodeid"].partition("::")[2]: entry for entry in report["tests"]}
    assert {name: entry["outcome"] for name, entry in tests.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_error": "error",
        "test_skipped": "skipped",
        "test_xfailed": "xfailed",
        "test_xpassed": "xpassed",
    }
    assert "assert 1 == 2" in tests["test_bad"]["reason"]
    assert "no room" in tests["test_error"]["reason"]
    assert (tests["test_skipped"]["reason"], tests["test_skipped"]["kind"]) == ("not today", "left out")
    assert all(0 <= entry["duration_s"] < 60 for entry in tests.values())
    (deselected,) = report["deselected"]
    assert (deselected["nodeid"].partition("::")[2], deselected["why"]) == ("test_left_out", "deselected")
    described = report["run"]
    assert report["state"] == "complete"
    assert described["exit_status"] == result.ret == 1
    assert before <= datetime.fromisoformat(described["started"]) <= datetime.now(UTC)
    assert 0 < described["duration_s"] < 600
    assert described["command"][-4:] == ["-k", "not left_out", "--emad-register", "claims.toml"]
    assert described["claims_file"] == {
        "path": str(project.path / "claims.toml"),
        "sha256": hashlib.sha256(b"[EMAD-F1]\ngate = false\n").hexdigest(),
    }
    assert described["project"] == {"root": str(project.path), "commit": None}


def test_the_commit_of_the_users_own_repository_is_named(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(): pass")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=project.path, check=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=project.path, text=True).strip()
    run("--emad-report", "out")
    assert report_of(project.path / "out")["run"]["project"]["commit"] == head


AUDITED = """
import pytest
from pytest_emad.audit.finding import Finding
from pytest_emad.run.suite_support import AuditFindingGate

@pytest.mark.parametrize("passed", [True, False, None])
def test_audit(emad_record, emad_settings, passed):
    AuditFindingGate(None, 0.0, emad_settings, emad_record)(Finding("rows", passed, "as seen", 7, 1))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_every_finding_of_an_audit_is_on_record(
    project: pytest.Pytester, run: Run, run_apart: Run, workers: int
) -> None:
    project.makepyfile(AUDITED)
    (run_apart if workers else run)("-n", workers, "--emad-report", "out", "--emad-model", "m")
    audits = report_of(project.path / "out")["audits"]
    assert sorted(str(audit["passed"]) for audit in audits) == ["False", "None", "True"]
    assert {(audit["check"], audit["detail"], audit["n"], audit["ties"]) for audit in audits} == {
        ("rows", "as seen", 7, 1)
    }
    assert all("::test_audit[" in audit["test"] for audit in audits)


# ---------------------------------------------------------------- states

LOOKS = """
import json, os
def state(): return json.load(open("out/report.json"))["state"]
"""


def test_a_report_says_running_from_the_first_test_on(project: pytest.Pytester, run_apart: Run) -> None:
    """It stays "running" if a decoder ends the process: exit status 0 proves nothing."""
    project.makepyfile(f"{LOOKS}\ndef test_first(): assert state() == 'running'\ndef test_gone(): os._exit(0)")
    earlier(project)
    assert run_apart("--emad-report", "out").ret == 0
    report = read_report(project.path / "out")
    assert (report["state"], report["run"]["exit_status"], report["tests"]) == ("running", None, [])
    assert cli.main(["verify", str(project.path / "out")]) == 1


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
@pytest.mark.parametrize("where", ["conftest.py", "pytest.ini"])
def test_an_end_before_the_first_test_does_not_leave_an_earlier_report_as_proof(
    project: pytest.Pytester,
    run: Run,
    run_apart: Run,
    end: str,
    where: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Importing a decoder may end the process: no report of this run, and exit status 0."""
    out = project.path / "out"
    project.makepyfile("def test(): pass")
    asked = ("--emad-report", "out")
    if where == "pytest.ini":
        (project.path / "pytest.ini").write_text("[pytest]\nemad_report = out\n")
        asked = ()
    assert run(*asked).ret == 0
    before = (out / "report.json").read_bytes()
    project.makeconftest(f"import os, sys\n{end}")
    assert run_apart(*asked).ret == 0
    assert (out / "report.json").read_bytes() == before
    assert cli.main(["verify", str(out)]) == 1
    assert "did not finish" in capsys.readouterr().err
    project.makeconftest("")
    assert run(*asked).ret == 0
    cli.main(["verify", str(out / "report.json")])
    assert "did not finish" not in capsys.readouterr().err


def test_a_run_that_says_why_it_did_not_start_leaves_an_earlier_report_as_it_was(
    project: pytest.Pytester, run: Run
) -> None:
    project.makepyfile("def test(): pass")
    assert run("--emad-report", "out").ret == 0
    assert run("--emad-report", "out", "--emad-seed", "x").ret == USAGE
    assert sorted(path.name for path in (project.path / "out").iterdir() if path.suffix == ".begun") == []


def test_a_test_run_by_workers_finds_the_report_begun(project: pytest.Pytester, run_apart: Run) -> None:
    project.makepyfile(f"{LOOKS}\ndef test_state(): assert state() == 'running'")
    result = run_apart("-n", 2, "--emad-report", "out")
    result.assert_outcomes(passed=1)
    assert report_of(project.path / "out")["state"] == "complete"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("pytest.exit('enough')", INTERRUPTED),
        ("pytest.exit('enough', returncode=0)", INTERRUPTED),
        ("pytest.exit('enough', returncode=7)", 7),
    ],
)
def test_a_run_that_was_stopped_is_interrupted_and_did_not_pass(
    suites: Path, project: pytest.Pytester, run: Run, body: str, status: int
) -> None:
    (suites / "test_a.py").write_text(f"import pytest\ndef test_stops(): {body}\ndef test_never(): pass\n")
    result = run("suites", "--emad-report", "out")
    assert result.ret == status
    report = report_of(project.path / "out")
    assert (report["state"], report["run"]["exit_status"]) == ("interrupted", status)
    assert {entry["nodeid"].partition("::")[2]: entry["outcome"] for entry in report["tests"]} == {
        "test_stops": "not reported",
        "test_never": "not reported",
    }


def test_a_run_of_other_tests_keeps_the_status_it_chose(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("import pytest\ndef test(): pytest.exit('enough', returncode=0)")
    assert run().ret == 0


def test_a_run_that_ends_at_its_first_failure_is_not_complete(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test_a(): assert False\ndef test_b(): pass")
    assert run("-x", "--emad-report", "out").ret == 1
    assert report_of(project.path / "out")["state"] == "interrupted"


UNLOADABLE = """
import pytest
from emad_ref.errors import RunStopped
@pytest.fixture
def model(): raise RunStopped("no such model")
def test_a(model): pass
"""


@pytest.mark.parametrize("text", [UNLOADABLE, "import pytest\n@pytest.mark.emad(budget='huge')\ndef test(): pass"])
def test_a_run_that_could_not_start_leaves_a_finished_report(project: pytest.Pytester, run: Run, text: str) -> None:
    project.makepyfile(text)
    folder = earlier(project)
    result = run("--emad-report", "out")
    assert result.ret == USAGE
    assert read_report(folder) == EARLIER
    result.stdout.fnmatch_lines(["emad: the finished report in *out stays: this run did not start"])


def test_a_run_that_could_not_start_says_so_where_nothing_was_finished(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(UNLOADABLE)
    earlier(project, sample_report.report(state="running"))
    assert run("--emad-report", "out").ret == USAGE
    report = read_report(project.path / "out")
    assert (report["state"], report["run"]["exit_status"]) == ("usage error", USAGE)


def test_a_broken_import_leaves_a_finished_report(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("import no_such_module")
    folder = earlier(project)
    assert run("--emad-report", "out").ret == INTERRUPTED
    assert read_report(folder) == EARLIER


def test_a_run_that_started_replaces_a_finished_report(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(): pass")
    earlier(project)
    run("--emad-report", "out")
    assert report_of(project.path / "out")["state"] == "complete"


def test_no_part_of_the_plugin_can_be_left_out_alone(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(): pass")
    for part in ("emad-reporting", "emad-attendance", "emad-attempts"):
        result = run("-p", f"no:{part}", "--emad-require", "speed", "--emad-report", "out")
        assert result.ret == USAGE
        assert f"-p no:{part} leaves out a part of this plugin" in result.stderr.str()
