"""No rerun, mark, hook or plugin turns a failed run into a proof: the run is red, or ``emad verify`` is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_emad import cli
from pytest_emad.report.schema import read_report
from pytest_emad.run import environment
from tests.plugin.conftest import Run, report_of, unwrapped
from tests.unit.report.sample_report import report, written

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
from pytest_emad.audit.finding import Finding

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
from pytest_emad.audit.finding import Finding

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

STOPPED = "def pytest_sessionfinish(session): session.shouldstop, session.exitstatus = 'enough', 0\n"
UNCOUNTED = "def pytest_exception_interact(node, report): node.session.testsfailed, report.outcome = 0, 'passed'\n"


@pytest.mark.parametrize("conftest", [UNCOUNTED, STOPPED])
def test_a_hook_that_clears_the_exit_status_before_the_report_changes_no_proof(
    suites: Path, project: pytest.Pytester, run: Run, conftest: str
) -> None:
    (suites / "test_a.py").write_text(
        'from verdicts import verdict\ndef test(emad_record): emad_record.record_claim(verdict("falsified"))\n'
    )
    project.makeconftest(f"import pytest\n{conftest}")
    run("suites", *REPORT)
    assert cli.main(["verify", str(project.path / "out")]) == 1


LATER = "@pytest.hookimpl(trylast=True)\ndef pytest_sessionfinish(session): session.exitstatus = 0\n"
LEAVES = "@pytest.hookimpl(trylast=True)\ndef pytest_sessionfinish(): pytest.exit('enough', returncode=0)\n"
ANSWERS = "@pytest.hookimpl(tryfirst=True)\ndef pytest_cmdline_main(): return 0\n"
REPLACES = "@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef pytest_cmdline_main():\n    yield\n    return 0\n"
UNREGISTERS = """
@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session): session.config.pluginmanager.unregister(name="emad-reporting")
"""


@pytest.mark.parametrize("conftest", [LATER, LEAVES, ANSWERS, REPLACES, UNREGISTERS])
def test_verify_is_red_whatever_exit_status_pytest_returns(
    suites: Path, project: pytest.Pytester, run: Run, conftest: str
) -> None:
    """pytest's own exit status belongs to its hooks. The report of an earlier run does not prove this one."""
    (suites / "test_a.py").write_text(
        'from verdicts import verdict\ndef test(emad_record): emad_record.record_claim(verdict("falsified"))\n'
    )
    written(project.path / "out", report())
    project.makeconftest(f"import pytest\n{conftest}")
    run("suites", *REPORT)
    begun = (project.path / "out" / "run.begun").is_file()
    assert begun == (conftest in (ANSWERS, UNREGISTERS)), "no report of this run was written"
    assert cli.main(["verify", str(project.path / "out")]) == 1


# ---------------------------------------------------------------- runs without tests


@pytest.mark.parametrize(
    ("option", "status"),
    [("--setup-only", NONE_RUN), ("--setup-plan", NONE_RUN), ("--collect-only", OK), ("--fixtures", OK)],
)
def test_a_run_without_tests_decides_nothing_and_replaces_no_report(
    suites: Path, project: pytest.Pytester, run: Run, option: str, status: pytest.ExitCode
) -> None:
    (suites / "test_a.py").write_text("def test(emad_record): assert False")
    written(project.path / "out", report())
    result = run("suites", option, *REPORT)
    assert result.ret == status
    assert read_report(project.path / "out") == report()
    assert f"emad: {option} runs no test: nothing was decided, and no report is written" in unwrapped(result).str()
