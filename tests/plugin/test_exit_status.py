"""The exit status follows the verdicts: no rerun, mark, hook or plugin turns a failed run green."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from emad_ref import cli
from pytest_emad import environment, integrity, suite_support
from tests.plugin.conftest import RECORDED, Run, report_of, unwrapped

OK, FAILED, NONE_RUN = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
REPORT = ("--emad-report", "out")


@pytest.fixture
def suites(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the plugin takes for its own suites."""
    folder = project.path / "suites" / "invariants"
    folder.mkdir(parents=True)
    monkeypatch.setattr(environment, "SUITES", (folder.parent,))
    return folder


def failures(project: pytest.Pytester) -> list[str]:
    found: list[str] = report_of(project.path / "out")["run"]["failures"]
    return found


def one(project: pytest.Pytester, *words: str) -> str:
    """Return the only failure of the run that contains all ``words``."""
    (found,) = [said for said in failures(project) if all(word in said for word in words)]
    return found


def gates(project: pytest.Pytester) -> dict[str, str]:
    return {claim["id"]: claim["verdict"] for claim in report_of(project.path / "out")["claims"]}


# ---------------------------------------------------------------- changed outcomes

FALSIFIED = """
from verdicts import verdict
from emad_ref.audit.finding import Finding

def test_mark(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-F1"))
def test_makereport(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-F2"))
def test_call(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-E2"))
def test_pyfunc(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-E5"))
def test_logreport(emad_record): emad_record.record_claim(verdict("falsified", "EAD-H1"))
def test_skipped(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-E1"))
def test_audited(emad_record):
    emad_record.record_audit(Finding("rows", False, "row 2 is off", 7, 1))
    raise AssertionError("row 2 is off")
def test_cleared(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-E3"))
def test_empty(emad_record): pass
def test_never(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-E4"))
def test_again(emad_record):
    tries.append(1)
    emad_record.record_claim(verdict("falsified" if len(tries) < 2 else "survived", "EMAD-E6"))
tries = []
def test_plain(emad_record):
    assert len(tries) == 2
    emad_record.record_claim(verdict("survived", "EMAD-E7"))
"""
CHANGES = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_mark": item.add_marker(pytest.mark.xfail(strict=False, reason="flaky"))

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.name in ("test_makereport", "test_audited") and report.failed: report.outcome = "passed"
    if item.name == "test_cleared":
        report.outcome = "passed"
        report.user_properties.clear()
        item.user_properties.clear()
    return report

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try: return (yield)
    except BaseException:
        if item.name != "test_call": raise

@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try: return (yield)
    except BaseException:
        if pyfuncitem.name == "test_again": return pyfuncitem.ihook.pytest_pyfunc_call(pyfuncitem=pyfuncitem)
        if pyfuncitem.name != "test_pyfunc": raise
        return True

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if "test_logreport" in report.nodeid: report.outcome = "passed"
    if "test_skipped" in report.nodeid and report.failed: report.outcome, report.longrepr = "skipped", ("f", 1, "x")

@pytest.hookimpl(specname="pytest_pyfunc_call", tryfirst=True)
def pytest_runs_nothing(pyfuncitem):
    return True if pyfuncitem.name == "test_never" else None
"""


def test_whatever_changes_an_outcome_the_run_is_red_and_names_it(
    suites: Path, project: pytest.Pytester, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (suites / "test_a.py").write_text(FALSIFIED)
    project.makeconftest(CHANGES)
    result = run("suites", *REPORT, "--emad-gate-claims", "EMAD-E1,EMAD-E3,EMAD-E4,EMAD-E6")
    result.assert_outcomes(passed=10, skipped=1, xfailed=1)
    assert result.ret == FAILED
    for claim, test, outcome in (
        ("EMAD-F1", "test_mark", "xfailed"),
        ("EMAD-F2", "test_makereport", "passed"),
        ("EMAD-E2", "test_call", "passed"),
        ("EMAD-E5", "test_pyfunc", "passed"),
        ("EMAD-E6", "test_again", "passed"),
    ):
        assert f"::{test} is reported as {outcome}" in one(
            project, f"{claim} of emad-tiny is falsified and fails the run"
        )
    told = {entry["nodeid"].partition("::")[2]: entry["outcome"] for entry in report_of(project.path / "out")["tests"]}
    assert (told["test_logreport"], told["test_skipped"]) == ("failed", "failed"), "read before that hook"
    assert "passed, although audit rows refuted it (row 2 is off)" in one(project, "::test_audited", "audit")
    for test in ("test_cleared", "test_empty", "test_never"):
        assert "put no audit and no verdict on record" in one(project, f"::{test} passed")
    assert "(falsified, then survived): the first verdict counts" in one(project, "EMAD-E6 of", "was decided 2 times")
    assert "the first attempt counts: run it once" in one(project, "::test_again is reported as passed")
    assert gates(project)["EMAD-E6"] == "falsified"
    assert not [said for said in failures(project) if "test_plain" in said]
    assert cli.main(["verify", str(project.path / "out")]) == 1
    assert "EMAD-F2 of emad-tiny is falsified and fails the run" in capsys.readouterr().err


# ---------------------------------------------------------------- repeated tests

# pytest-rerunfailures: each attempt is a whole protocol; the last is reported, the others as "rerun"
RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in (1, 2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        again = attempt == 1 and any(report.failed for report in reports)
        for report in reports:
            if again and report.failed:
                if item.name.startswith("test_silent"): break
                report.outcome = "rerun"
                item.ihook.pytest_runtest_logreport(report=report)
                break
            if not again or not item.name.startswith("test_silent"):
                item.ihook.pytest_runtest_logreport(report=report)
        if not again: break
        item._initrequest()
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True

def pytest_report_teststatus(report):
    if report.outcome == "rerun": return "rerun", "R", "RERUN"
"""
FLAKY = """
from verdicts import verdict
from emad_ref.audit.finding import Finding

tries = {}
def first(name):
    tries[name] = tries.get(name, 0) + 1
    return tries[name] == 1
def test_claim(emad_record): emad_record.record_claim(verdict("falsified" if first("claim") else "survived", "EMAD-F1"))
def test_silent(emad_record):
    emad_record.record_claim(verdict("falsified" if first("silent") else "survived", "EMAD-F2"))
def test_audit(emad_record):
    passed = not first("audit")
    emad_record.record_audit(Finding("rows", passed, "row 2", 7, 1))
    assert passed
def test_crash(emad_record):
    if first("crash"): raise OSError("no route to the hub")
    emad_record.record_claim(verdict("survived", "EMAD-E2"))
class Unprintable(Exception):
    def __str__(self): return 1 / 0
def test_unprintable(emad_record):
    if first("unprintable"): raise Unprintable
    emad_record.record_audit(Finding("rows", True, "", 7, 0))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_attempt_is_the_verdict(
    suites: Path, project: pytest.Pytester, run: Run, run_apart: Run, workers: int
) -> None:
    """Also under xdist, whose workers take the folder for the user's own tests."""
    (suites / "test_a.py").write_text(FLAKY)
    project.makeconftest(RERUNS)
    result = run("suites", *REPORT) if not workers else run_apart("-n", workers, "suites", *REPORT)
    assert result.ret == FAILED
    assert "gates: 2 of 2" not in result.stdout.str()
    found = report_of(project.path / "out")
    assert {entry["outcome"] for entry in found["tests"]} == {"passed"}
    assert gates(project) == {"EMAD-F1": "falsified", "EMAD-F2": "falsified"}
    assert "is falsified and fails the run, but its test" in one(project, "EMAD-F1 of", "::test_claim")
    assert "(falsified, then survived): the first verdict counts" in one(project, "EMAD-F1 of", "decided 2 times")
    assert "(falsified, then survived): the first verdict counts" in one(project, "EMAD-F2 of", "decided 2 times")
    assert "(no verdict, then survived)" in one(project, "EMAD-E2 of", "decided 2 times")
    passed = [audit["passed"] for audit in found["audits"]]
    assert sorted(passed) == [False, True, True], "two workers report in either order"
    assert "audit rows refuted it (row 2); the first attempt counts: run it once" in one(project, "::test_audit:")
    if not workers:
        assert "first attempt ended as failed (OSError: no route to the hub), then passed" in one(
            project, "::test_crash"
        )
        assert "ended as failed (Unprintable: its text raises ZeroDivisionError)" in one(project, "::test_unprintable")
    assert cli.main(["verify", str(project.path / "out")]) == 1


def test_a_claim_that_two_tests_decide_differently_is_decided_once(project: pytest.Pytester, run: Run) -> None:
    """Two records of one fact count once."""
    project.makepyfile(
        """
        import pytest
        from verdicts import verdict
        @pytest.mark.parametrize("n", [1, 2, 3])
        def test_claim(emad_record, n): emad_record.record_claim(verdict("survived" if n < 3 else "inconclusive"))
        @pytest.mark.parametrize("n", [1, 2])
        def test_alike(emad_record, n): emad_record.record_claim(verdict("survived", "EMAD-F2"))
        """
    )
    assert run(*REPORT).ret == FAILED
    assert failures(project) == [one(project, "EMAD-F1 of emad-tiny was decided 2 times (survived, then inconclusive)")]
    assert gates(project) == {"EMAD-F1": "survived", "EMAD-F2": "survived"}


FORGETS = RERUNS.replace(
    "        if not again: break\n", "        if not again: break\n        item.user_properties = []\n"
)


def test_an_attempt_whose_records_were_thrown_away_is_missed(suites: Path, project: pytest.Pytester, run: Run) -> None:
    (suites / "test_a.py").write_text(FLAKY)
    project.makeconftest(FORGETS)
    assert run(f"{suites}/test_a.py::test_silent", *REPORT).ret == FAILED
    assert "its first attempt never ended, then passed; the first attempt counts" in one(project, "::test_silent:")


# ---------------------------------------------------------------- changed exit statuses

LATER = "@pytest.hookimpl(trylast=True)\ndef pytest_sessionfinish(session): session.exitstatus = 0\n"
EARLIER = """
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session): session.exitstatus = session.testsfailed = 0
"""
UNCOUNTED = "def pytest_exception_interact(node, report): node.session.testsfailed, report.outcome = 0, 'passed'\n"
STOPPED = "def pytest_sessionfinish(session): session.shouldstop, session.exitstatus = 'enough', 0\n"
LEAVES = "@pytest.hookimpl(trylast=True)\ndef pytest_sessionfinish(): pytest.exit('enough', returncode=0)\n"


@pytest.mark.parametrize("conftest", [LATER, EARLIER, UNCOUNTED, STOPPED, LEAVES])
def test_an_exit_status_that_was_changed_stays_red(
    suites: Path, project: pytest.Pytester, run: Run, conftest: str
) -> None:
    (suites / "test_a.py").write_text(
        'from verdicts import verdict\ndef test(emad_record): emad_record.record_claim(verdict("falsified"))\n'
    )
    project.makeconftest(f"import pytest\n{conftest}")
    assert run("suites", *REPORT).ret != OK
    assert report_of(project.path / "out")["run"]["exit_status"] != 0
    assert cli.main(["verify", str(project.path / "out")]) == 1


ANSWERS = "@pytest.hookimpl(tryfirst=True)\ndef pytest_cmdline_main(): return 0\n"
REPLACES = "@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef pytest_cmdline_main():\n    yield\n    return 0\n"


@pytest.mark.parametrize(
    ("conftest", "words"),
    [
        (ANSWERS, "ended this run before it began: no test ran"),
        (REPLACES, "returned 0 after this run had ended with 1"),
    ],
)
def test_a_command_that_another_plugin_answers_is_no_green_run(
    suites: Path, project: pytest.Pytester, run: Run, conftest: str, words: str
) -> None:
    (suites / "test_a.py").write_text("def test(): assert False")
    project.makeconftest(f"import pytest\n{conftest}")
    result = run("suites", *REPORT)
    assert result.ret == FAILED
    assert f"emad: a plugin's pytest_cmdline_main {words}" in result.stderr.str()
    assert cli.main(["verify", str(project.path / "out")]) == 1
    assert run("suites", "--markers").ret == OK
    project.makepyfile(test_own="def test(): assert False")
    assert run("test_own.py").ret == OK, "the plugin does not judge this test"


@pytest.mark.parametrize("part", ["emad-reporting", "emad-attempts", "emad-fixtures"])
def test_a_part_that_is_taken_out_of_the_run_is_named(
    suites: Path, project: pytest.Pytester, run: Run, part: str
) -> None:
    """The report of an earlier run does not prove this one."""
    (suites / "test_a.py").write_text("def test(): pass")
    (project.path / "out").mkdir()
    (project.path / "out" / "report.json").write_text(json.dumps({"schema": 1}))
    taken = f"config.pluginmanager.unregister(name={part!r})"
    project.makeconftest(
        f"import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtestloop(session): session.{taken}"
    )
    result = run("suites", *REPORT)
    assert result.ret != OK
    assert f"emad: {part} was taken out of this run, which proves nothing" in result.stderr.str()
    assert (project.path / "out" / "run.begun").is_file()


def test_the_exit_status_of_other_tests_is_their_own(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(): assert False")
    project.makeconftest(f"import pytest\n{LATER}")
    assert run().ret == OK


# ---------------------------------------------------------------- runs without tests


@pytest.mark.parametrize(
    ("option", "status"),
    [("--setup-only", NONE_RUN), ("--setup-plan", NONE_RUN), ("--collect-only", OK), ("--fixtures", OK)],
)
def test_a_run_without_tests_decides_nothing_and_replaces_no_report(
    suites: Path, project: pytest.Pytester, run: Run, option: str, status: pytest.ExitCode
) -> None:
    (suites / "test_a.py").write_text("def test(emad_record): assert False")
    file = project.path / "out" / "report.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"schema": 1}))
    result = run("suites", option, *REPORT)
    assert result.ret == status
    assert json.loads(file.read_text()) == {"schema": 1}
    assert f"emad: {option} runs no test: nothing was decided, and no report is written" in unwrapped(result).str()


# ---------------------------------------------------------------- replaced parts of the plugin

OVERRIDES = """
import functools
import pytest
import emad_ref.audit.finding as finding
import emad_ref.audit.token_comparison as sameness
from pytest_emad import recorder, suite_support

@pytest.fixture
def emad_rng(): return None

@pytest.fixture(autouse=True)
def patched(request, monkeypatch):
    if request.node.name == "test_patched":
        real = sameness.check_same_tokens
        monkeypatch.setattr(sameness, "check_same_tokens", functools.wraps(real)(lambda *given, **more: None))
        monkeypatch.setattr(suite_support, "largest_threshold_change", lambda *given: 0.0)
        monkeypatch.setattr(finding, "TIE_LIMIT", 1.0)
        monkeypatch.setattr(finding, "Tally", type("Tally", (finding.Tally,), {}))
        monkeypatch.setattr(recorder.Recorder, "record_note", functools.partialmethod(print))
        monkeypatch.setattr(suite_support.AuditFindingGate, "__call__", lambda self, found: None)

def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_body": item.obj = lambda emad_record: None

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if item.name == "test_argument": item.funcargs["emad_register"] = {}
"""
JUDGES = """
from emad_ref.audit.finding import Finding
def audited(emad_record): emad_record.record_audit(Finding("rows", True, "", 1, 0))
def test_fixture(emad_record, emad_rng): audited(emad_record)
def test_patched(emad_record): audited(emad_record)
def test_argument(emad_record, emad_register): audited(emad_record)
def test_body(emad_record): assert False
"""


def test_a_part_of_ours_that_is_replaced_is_named(
    suites: Path, project: pytest.Pytester, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (suites / "test_a.py").write_text(JUDGES)
    project.makeconftest(OVERRIDES)
    result = run("suites", *REPORT)
    result.assert_outcomes(passed=4)
    assert result.ret == FAILED
    conftest = f"{project.path / 'conftest.py'}"
    named = {part["what"]: part["by"] for part in report_of(project.path / "out")["replaced"]}
    assert set(named) >= {
        "fixture emad_rng",
        "fixture emad_register",
        "the body of suites/invariants/test_a.py::test_body",
        "emad_ref.audit.token_comparison.check_same_tokens",
        "pytest_emad.suite_support.check_same_tokens",
        "pytest_emad.suite_support.largest_threshold_change",
        "emad_ref.audit.finding.TIE_LIMIT",
        "emad_ref.audit.finding.Tally",
        "pytest_emad.recorder.Recorder.record_note",
        "pytest_emad.suite_support.AuditFindingGate.__call__",
    }
    assert {what.rpartition(".")[2] for what in named if "emad_ref" in what} == {
        "check_same_tokens",
        "TIE_LIMIT",
        "Tally",
    }
    assert named["fixture emad_rng"].startswith(conftest)
    assert named["pytest_emad.suite_support.AuditFindingGate.__call__"].startswith(conftest)
    assert "a run with another judge proves nothing" in one(project, "replaced: fixture emad_rng by")
    assert cli.main(["verify", str(project.path / "out")]) == 1
    assert "replaced: fixture emad_rng by" in capsys.readouterr().err


def test_a_module_behind_a_symbolic_link_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(environment.SOURCE_ROOT, target_is_directory=True)
    monkeypatch.setattr(suite_support, "__file__", str(tmp_path / "link" / "pytest_emad" / "suite_support.py"))
    assert not list(integrity._replaced_in_module("pytest_emad.suite_support", suite_support))
    monkeypatch.setattr(suite_support, "largest_threshold_change", lambda *given: 0.0)
    ((what, _),) = integrity._replaced_in_module("pytest_emad.suite_support", suite_support)
    assert what == "pytest_emad.suite_support.largest_threshold_change"


LEAVES_OFF = """
import pytest
LIMIT = 1
def first(): pass
pytest.importorskip("a_package_that_is_not_installed", reason="not installed")
from emad_ref.audit.finding import Finding
ROWS = 4
class Last: pass
def test_last(emad_audit): pass
"""


def test_what_a_skipped_module_never_defined_was_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_left_off.py"
    file.write_text(LEAVES_OFF)
    monkeypatch.setattr(integrity, "SOURCE_ROOT", tmp_path.resolve())
    spec = importlib.util.spec_from_file_location("suites.fidelity.test_left_off", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(pytest.skip.Exception):
        spec.loader.exec_module(module)
    assert not list(integrity._replaced_in_module(module.__name__, module))
    monkeypatch.delattr(module, "first")
    monkeypatch.setattr(module, "LIMIT", 2)
    assert {what.rpartition(".")[2] for what, _ in integrity._replaced_in_module(module.__name__, module)} == {"LIMIT"}
    monkeypatch.setattr(module, "Last", None, raising=False)
    named = {what.rpartition(".")[2] for what, _ in integrity._replaced_in_module(module.__name__, module)}
    assert named >= {"LIMIT", "first", "Last"}


def test_nothing_of_ours_is_replaced_where_nobody_does(suites: Path, project: pytest.Pytester, run: Run) -> None:
    (suites.parent / "conftest.py").write_text(RECORDED)
    (suites / "test_a.py").write_text("def test(emad_register, emad_rng): pass")
    assert run("suites", *REPORT).ret == OK
    found: dict[str, Any] = report_of(project.path / "out")
    assert (found["replaced"], found["repeats"], found["run"]["failures"]) == ([], [], [])
    assert [entry["attempts"] for entry in found["tests"]] == [[{"outcome": "passed", "reason": ""}]]
