"""Known gaps: a listed test that fails is reported with its reason, and one that passes fails the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_emad.report.verification import find_contradictions
from pytest_emad.run import environment as installation
from tests.plugin.conftest import Run, report_of, unwrapped

OK, FAILED, USAGE = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.USAGE_ERROR
ROWS = "suites/invariants/test_shapes.py::test_rows"
FILE = """
import pytest
from pytest_emad.audit.finding import Finding

@pytest.mark.parametrize("case", ["wide", "long"])
def test_rows(emad_record, case):
    finding = Finding("rows", case != "wide", "row 0: other tokens", 1, 0, complaint="row 0: other tokens")
    emad_record.record_audit(finding)
    assert finding.passed, "row 0: other tokens"

def test_setup(broken): pass

def test_premise(): pytest.skip("not applicable (no text)")

@pytest.fixture
def broken(): raise OSError("no disk")
"""
CLAIM = """
from verdicts import verdict
def test_claim(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-F1"))
"""


@pytest.fixture
def suites(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small folder that the plugin takes for its own suites."""
    folder = project.path / "suites"
    for name, text in {"invariants/test_shapes": FILE, "claims/test_model": CLAIM}.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.setattr(installation, "SUITES", (folder,))
    return folder


def listed(project: pytest.Pytester, *tests: str, reason: str = "wide rows are cut") -> str:
    text = "".join(f'[[gap]]\ntest = "{test}"\nreason = "{reason}"\n' for test in tests)
    return f"--emad-known-gaps={project.makefile('.toml', gaps=text)}"


def test_a_listed_failure_is_told_with_its_reason_and_fails_nothing(
    suites: Path, project: pytest.Pytester, run: Run
) -> None:
    assert run("suites/invariants", "-k", "rows").ret == FAILED
    result = run("suites/invariants", "-k", "rows", "--emad-report", "out", listed(project, f"{ROWS}[wide]"))
    assert result.ret == OK
    result.assert_outcomes(passed=1, xfailed=1, deselected=2)
    unwrapped(result).fnmatch_lines(
        [
            "PASSED: 2 tests were the gate: 1 failed as a known gap, 1 passed",
            f"emad: known gap {ROWS}[[]wide]: wide rows are cut",
        ]
    )
    report = report_of(project.path / "out")
    assert [(test["outcome"], test["reason"]) for test in report["tests"]] == [
        ("xfailed", "wide rows are cut"),
        ("passed", ""),
    ]
    assert find_contradictions(report) == []
    assert [test.get("known_gap") for test in report["tests"]] == [f"{ROWS}[wide]", None]
    report["settings"]["known_gaps"] = {}
    assert [line for line in find_contradictions(report) if "no such test is listed" in line]
    del report["tests"][0]["known_gap"]
    assert [line for line in find_contradictions(report) if "xfailed, although audit rows refuted it" in line]


def test_a_listed_test_that_passes_fails_the_run(suites: Path, project: pytest.Pytester, run: Run) -> None:
    result = run("suites/invariants", "-k", "rows", listed(project, ROWS))
    assert result.ret == FAILED
    result.assert_outcomes(failed=1, xfailed=1, deselected=2)
    unwrapped(result).fnmatch_lines([f"*known gap closed: the test passes; remove {ROWS} from the file*"])


def test_a_failing_verdict_of_a_known_gap_fails_nothing(suites: Path, project: pytest.Pytester, run: Run) -> None:
    test = "suites/claims/test_model.py::test_claim"
    assert run("suites/claims").ret == FAILED
    result = run("suites/claims", listed(project, test))
    assert result.ret == OK
    assert "FAILED" not in result.stdout.str()


def test_a_failed_setup_is_no_known_gap(suites: Path, project: pytest.Pytester, run: Run) -> None:
    gaps = listed(project, "suites/invariants/test_shapes.py::test_setup")
    run("suites/invariants", "-k", "setup", gaps).assert_outcomes(errors=1, deselected=3)


def test_a_skipped_or_deselected_test_is_neither_known_nor_closed(
    suites: Path, project: pytest.Pytester, run: Run
) -> None:
    assert run("suites/invariants", "-k", "long", listed(project, f"{ROWS}[wide]")).ret == OK
    assert run(f"{suites}/claims", "--emad-only", "EMAD-E1", listed(project, ROWS)).ret == pytest.ExitCode(5)
    premise = listed(project, "suites/invariants/test_shapes.py::test_premise")
    run("suites/invariants", "-k", "premise", premise).assert_outcomes(skipped=1, deselected=3)


def test_a_skip_of_somebody_else_is_no_known_gap(suites: Path, project: pytest.Pytester, run: Run) -> None:
    project.makeconftest("def pytest_runtest_call(item):\n    import pytest; pytest.skip('later')")
    run("suites/invariants", "-k", "wide", listed(project, ROWS)).assert_outcomes(failed=1, deselected=3)


def test_a_mark_makes_no_known_gap(suites: Path, project: pytest.Pytester, run: Run) -> None:
    """A test that never ran shows no failure."""
    project.makeconftest(
        "import pytest\ndef pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.xfail(run=False))"
    )
    run("suites/invariants", "-k", "rows", "--emad-report", "out", listed(project, ROWS))
    report = report_of(project.path / "out")
    assert ["known_gap" in test for test in report["tests"]] == [False, False]


@pytest.mark.parametrize(
    ("test", "nearest"),
    [
        (f"{ROWS}[wider]", f"nearest: {ROWS}[wide]"),
        ("suites/invariants/test_shapes.py::test_row", f"nearest: {ROWS}"),
        ("nothing of the kind", ""),
    ],
)
def test_a_name_that_is_no_test_of_the_run_is_a_usage_error(
    suites: Path, project: pytest.Pytester, run: Run, test: str, nearest: str
) -> None:
    result = run("suites", listed(project, test))
    assert result.ret == USAGE
    said = result.stderr.str()
    assert f"--emad-known-gaps={test!r}, but expected the name of a shipped test of this run" in said
    assert nearest in said


def test_a_case_that_another_part_holds_is_no_mistake(suites: Path, project: pytest.Pytester, run: Run) -> None:
    """One file serves the whole run and its parts."""
    result = run("suites/claims", "--emad-gate", "decoder", listed(project, f"{ROWS}[wider]"))
    assert result.ret == OK
    assert run("suites/invariants", "-k", "long", listed(project, f"{ROWS}[wider]")).ret == OK


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[gap]]\ntest = 'a'", "a test and a reason, both texts, in each [[gap]]"),
        ("[[gap]]\ntest = 'a'\nreason = ' '", "a test and a reason, both texts, in each [[gap]]"),
        ("[[gap]]\ntest = 'a'\nreason = 'b'\nuntil = 'c'", "a test and a reason, both texts, in each [[gap]]"),
        ("gap = ['a']", "a test and a reason, both texts, in each [[gap]]"),
        ("[gap]\ntest = 'a'", "tables [[gap]] alone"),
        ("[[gaps]]\ntest = 'a'", "tables [[gap]] alone"),
        ("[[gap]]\ntest = 'a'\nreason = 'b'\n[[gap]]\ntest = 'a'\nreason = 'c'", "each test once"),
        ("[[gap]", "valid TOML in UTF-8"),
    ],
)
def test_a_file_of_other_content_is_refused(project: pytest.Pytester, run: Run, text: str, said: str) -> None:
    result = run(f"--emad-known-gaps={project.makefile('.toml', gaps=text)}")
    assert result.ret == USAGE
    assert said in result.stderr.str()


def test_a_file_without_gaps_lists_none(suites: Path, project: pytest.Pytester, run: Run) -> None:
    assert run("suites/invariants", "-k", "long", listed(project)).ret == OK
