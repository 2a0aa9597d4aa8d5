"""Selection and order of tests by claim, pair, exit and budget; deselected tests neither run nor count as missing."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_emad.report.deselection import SUITES
from pytest_emad.report.gaps import find_gaps
from pytest_emad.run import environment
from pytest_emad.run.selection import FOLDERS, sorted_by_suite_folder, sorted_gates_first_per_model
from tests.plugin.conftest import RECORDED, Run, report_of, unwrapped

MODEL = """
import pytest
from verdicts import verdict
CLAIMS = ["EMAD-E1", "EMAD-F1", "EMAD-R1", "EMAD-R2"]
@pytest.mark.parametrize("claim", [pytest.param(c, marks=pytest.mark.emad(claim=c)) for c in CLAIMS])
def test_claim(emad_record, claim):
    emad_record.record_claim(verdict("survived", claim))
def test_of_no_claim(): pass
"""
PAIR = """
import pytest
from verdicts import verdict
@pytest.mark.emad(claim="EAD-H1")
def test_claim_of_names(emad_pair_names, emad_record):
    emad_record.record_claim(verdict("survived", "EAD-H1"))
@pytest.mark.emad(claim="EAD-F1")
def test_claim(emad_pair): assert False, "no model is loaded"
def test_tokens(emad_pair): assert False, "no model is loaded"
"""
NOBODYS = "no pair was named; name one by --emad-pair SMALL,LARGE"


@pytest.fixture
def suites(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the plugin takes for its own suites."""
    folder = project.path / "suites" / "claims"
    folder.mkdir(parents=True)
    (folder.parent / "conftest.py").write_text(RECORDED)
    (folder / "test_model.py").write_text(MODEL)
    monkeypatch.setattr(environment, "SUITES", (project.path / "suites",))
    return folder


def test_claims_about_a_pair_are_not_asked_beside_a_model_of_ones_own(suites: Path, run: Run) -> None:
    (suites / "test_pair.py").write_text(PAIR)
    result = run("suites", "--emad-model", "random:emad-nano", "--emad-report", "out")
    result.assert_outcomes(passed=5, deselected=3)
    said = (
        'skipped "The paper\'s token shares give the savings it states" (EAD-H1) and "Switching models keeps the '
        f"large model's score\" (EAD-F1) and 1 other test: {NOBODYS}"
    )
    assert unwrapped(result).str().count(NOBODYS) == 1
    assert f"emad: {said}" in unwrapped(result).str()
    report = report_of(suites.parents[1] / "out")
    assert report["notes"] == [said]
    assert report["settings"]["pair"] is None
    assert {entry["why"] for entry in report["deselected"]} == {"no pair was named"}
    assert [entry["claim"] for entry in report["deselected"]] == ["EAD-H1", "EAD-F1", None]


@pytest.mark.parametrize("option", [("--emad-model", "emad-tinny"), ("--emad-pair", "emad-nano,emad-tinny")])
def test_a_model_that_does_not_exist_ends_the_run_before_collection(
    suites: Path, run: Run, option: tuple[str, str]
) -> None:
    result = run("suites", *option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = " ".join(result.stderr.str().split())
    assert "name='emad-tinny', but expected one of emad-nano" in said
    assert "nearest: emad-tiny" in said
    assert "collected" not in result.stdout.str()


def test_a_pair_that_was_named_is_asked_about(suites: Path, run: Run) -> None:
    (suites / "test_pair.py").write_text(PAIR)
    pair = ("--emad-pair", "emad-nano,random:emad-nano")
    result = run("suites", "--emad-model", "random:emad-nano", *pair, "-k", "names", "--emad-report", "out")
    result.assert_outcomes(passed=1, deselected=7)
    report = report_of(suites.parents[1] / "out")
    assert report["settings"]["pair"] == ["emad-nano", "random:emad-nano"]
    assert report["notes"] == []


def test_a_test_of_the_users_hears_that_no_pair_was_named(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test_pair(emad_pair): pass")
    result = run("--emad-model", "random:emad-nano")
    assert result.ret != pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*--emad-pair=None, but expected SMALL,LARGE; ours is judged*"])


@pytest.mark.parametrize("arguments", [["--emad-only=EMAD-F1,EMAD-R*"], ["--emad-only=EMAD-F1", "--emad-only=emad-r?"]])
def test_claims_are_chosen_by_id_and_pattern(suites: Path, run: Run, arguments: list[str]) -> None:
    result = run("suites", *arguments, "--emad-report", "out")
    result.assert_outcomes(passed=3, deselected=2)
    title = "Each layer is surer of the next token than the last"
    said = f'skipped "{title}" (EMAD-E1) and 1 other test: left out by --emad-only'
    assert f"emad: {said}" in unwrapped(result).str()
    report = report_of(suites.parents[1] / "out")
    assert [claim["id"] for claim in report["claims"]] == ["EMAD-F1", "EMAD-R1", "EMAD-R2"]
    assert report["notes"] == [said]
    assert {"EMAD-F1", "EMAD-R1"} < set(report["settings"]["only"])


def test_tests_of_the_users_that_name_no_claim_are_theirs_to_choose(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("import pytest\ndef test_own(): pass\n@pytest.mark.emad(claim='EMAD-E1')\ndef test_e1(): pass")
    run("--emad-only", "EMAD-F1").assert_outcomes(passed=1, deselected=1)


FOREIGN = """
import pytest
@pytest.hookimpl
def pytest_emad_make_decoder(config, request): return None
"""


def test_what_was_left_out_on_request_is_missing_from_a_proof_alone(
    suites: Path, project: pytest.Pytester, run: Run
) -> None:
    project.makeconftest(FOREIGN)
    run("suites", "--emad-only", "EMAD-F1", "--emad-report", "out").assert_outcomes(passed=1, deselected=4)
    report = report_of(project.path / "out")
    shipped = ["suites/claims/test_model.py::test_claim", "suites/claims/test_model.py::test_of_no_claim"]
    assert report["run"]["failures"] == []
    assert find_gaps(report, ["suites"], shipped) == []
    found = [str(gap) for gap in find_gaps(report, ["suites"], shipped, always=True)]
    assert any("test_claim: left out by --emad-only: EMAD-E1, EMAD-R1, EMAD-R2; let it run" in gap for gap in found)
    assert any("test_of_no_claim: left out by --emad-only" in gap for gap in found)


def test_a_gate_that_was_left_out_is_missing_from_a_proof(suites: Path, project: pytest.Pytester, run: Run) -> None:
    project.makeconftest(FOREIGN)
    run("suites", "--emad-only", "EMAD-E1", "--emad-report", "out").assert_outcomes(passed=1, deselected=4)
    report, shipped = report_of(project.path / "out"), ["suites/claims/test_model.py::test_claim"]
    assert find_gaps(report, ["suites"], shipped) == []
    assert "EMAD-F1" in [gap.of for gap in find_gaps(report, ["suites"], shipped, always=True)]


@pytest.mark.parametrize(("only", "status"), [("EMAD-F1", 0), ("EMAD-E1,EMAD-R1", 1)])
def test_a_gate_that_was_left_out_is_not_green_for_require(suites: Path, run: Run, only: str, status: int) -> None:
    """EMAD-E1 needs quality too and was decided, so the requirement alone would be met."""
    result = run("suites", "--emad-only", only, "--emad-require", "quality")
    assert result.ret == status
    said = "emad: FAILED: --emad-require quality: EMAD-F1 gates, and was left out by --emad-only"
    assert (said in unwrapped(result).str()) == bool(status)


@pytest.mark.parametrize("workers", [0, 2])
def test_choices_cross_to_the_xdist_controller(
    project: pytest.Pytester, run: Run, run_apart: Run, workers: int
) -> None:
    judge = run_apart if workers else run
    project.makepyfile(MODEL)
    result = judge("-n", workers, "--emad-only", "EMAD-F1", "--emad-require", "quality")
    assert result.ret == pytest.ExitCode.OK
    left = judge("-n", workers, "--emad-only", "EMAD-E1", "--emad-require", "quality")
    left.stdout.fnmatch_lines(["emad: skipped 3 claims (EMAD-F1, EMAD-R1, EMAD-R2): left out by --emad-only"])
    assert left.ret == pytest.ExitCode.TESTS_FAILED


OF_EXIT = """
import pytest
@pytest.fixture
def emad_exit(): return "the exit"
def test_of_an_exit(emad_exit): pass
"""


def test_tests_of_an_exit_are_asked_where_one_was_brought_and_else_passed_over_in_silence(
    suites: Path, project: pytest.Pytester, run: Run
) -> None:
    (suites / "test_model.py").write_text(OF_EXIT)
    project.makeconftest(FOREIGN)
    result = run("suites", "--emad-report", "out")
    result.assert_outcomes(deselected=1)
    report = report_of(project.path / "out")
    assert [entry["why"] for entry in report["deselected"]] == ["no exit was brought"]
    assert report["notes"] == []
    assert find_gaps(report, ["suites"], ["suites/claims/test_model.py::test_of_an_exit"], always=True) == []
    (project.path / "found.exit").touch()
    run("suites", "--emad-exit", "found.exit").assert_outcomes(passed=1)


WAITING = """
import pytest
from verdicts import verdict
@pytest.mark.parametrize("claim", [
    pytest.param("EMAD-E12", marks=pytest.mark.emad(claim="EMAD-E12", budget="standard")),
    pytest.param("EMAD-F1", marks=pytest.mark.emad(claim="EMAD-F1", budget="standard")),
    pytest.param("EMAD-X1", marks=pytest.mark.emad(claim="EMAD-X1", budget="standard")),
])
def test_claim(emad_record, claim):
    emad_record.record_claim(verdict("survived", claim))
@pytest.mark.emad(claim="EAD-A1", budget="standard")
def test_of_the_pair(emad_record, emad_pair_names):
    emad_record.record_claim(verdict("survived", "EAD-A1"))
"""
SOON = ("EMAD-F1",)  # it gates
LATE = ("EMAD-E12", "EMAD-F1", "EMAD-X1", "EAD-A1")


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], SOON),
        (["--emad-budget", "standard"], LATE),
        (["--emad-all-claims"], LATE),
        (["--emad-only", "EMAD-E12"], ("EMAD-E12",)),
        (["--emad-gate-claims", "EMAD-E12"], ("EMAD-E12", "EMAD-F1")),
        (["--emad-pair", "emad-nano,emad-tiny"], ("EMAD-F1", "EAD-A1")),
        (["--emad-exit", "found.exit"], ("EMAD-F1", "EMAD-X1")),
    ],
)
def test_a_claim_that_takes_long_waits_unless_it_gates_or_is_asked_for(
    suites: Path, run: Run, arguments: list[str], asked: tuple[str, ...]
) -> None:
    (suites / "test_model.py").write_text(WAITING)
    (suites.parents[1] / "found.exit").write_text("found")
    run("suites", *arguments, "--emad-report", "out")
    report = report_of(suites.parents[1] / "out")
    assert {entry["id"] for entry in report["claims"]} == set(asked)
    assert report["provenance"].get("exit") == (
        sha256(b"found").hexdigest()[:16] if "--emad-exit" in arguments else None
    )
    said = any("--emad-all-claims" in note for note in report["notes"])
    waiting = not {"EMAD-E12", "EAD-A1"} <= set(asked) and "--emad-only" not in arguments
    assert said == waiting, "the waiting claims are named once"


def at(path: Path | str, name: str = "", model: str | None = None, **marked: Any) -> Any:
    """The attributes of a test that ordering reads."""
    mark = SimpleNamespace(kwargs=marked) if marked else None
    return SimpleNamespace(
        path=Path(path),
        name=name,
        get_closest_marker=lambda wanted: mark,
        callspec=SimpleNamespace(params={"emad_model": model} if model else {}),
    )


def ours(folder: str, name: str = "", model: str | None = None, **marked: Any) -> Any:
    return at(SUITES[0] / folder / "test_any.py", name, model, **marked)


def test_what_takes_seconds_comes_first_and_each_folder_keeps_its_order() -> None:
    items = [ours("claims", "a"), ours("claims", "b"), ours("cost"), ours("fidelity"), ours("invariants")]
    found = sorted_by_suite_folder(items)
    assert [item.path.parent.name for item in found] == ["invariants", "fidelity", "claims", "claims", "cost"]
    assert [item.name for item in found if item.name] == ["a", "b"]


def test_other_peoples_tests_keep_their_places() -> None:
    theirs, more = at("/elsewhere/test_a.py"), at("/elsewhere/test_z.py")
    first, last = ours("claims"), ours("invariants")
    assert sorted_by_suite_folder([theirs, first, more, last]) == [theirs, last, more, first]


@pytest.mark.parametrize("root", [root for root in SUITES if root.is_dir()] or SUITES)
def test_every_folder_of_suites_has_its_place(root: Path) -> None:
    assert {path.name for path in root.iterdir() if any(path.glob("test_*.py"))} == set(FOLDERS)


def test_gates_come_first_of_each_model_and_what_measures_stays() -> None:
    asked = [
        ours("claims", "a", model="one", claim="X-1"),
        ours("claims", "b", model="one", claim="X-F1"),
        ours("claims", "c", model="one", claim="X-E2"),
        ours("cost", "d", model="one", claim="X-F2", measures=True),
        ours("claims", "e", model="two", claim="X-1"),
        ours("claims", "f", model="two", claim="X-F1"),
        ours("claims", "g", claim="X-H1"),
        at("/elsewhere/test_z.py", "h", claim="X-F1"),
    ]
    found = sorted_gates_first_per_model(asked, gating={"X-F1", "X-E2", "X-F2", "X-H1"}, exact={"X-E2", "X-H1"})
    assert "".join(item.name for item in found) == "gcbadfeh"


def test_a_refused_pair_ends_the_run_before_any_question(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test_pair(emad_pair):\n    assert False, 'never asked'\n")
    result = run("--emad-pair", "emad-tiny,emad-nano")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = result.stdout.str() + result.stderr.str()
    assert "--emad-pair='emad-tiny (" in said
    assert "never asked" not in said


def test_a_larger_budget_is_no_remedy_for_what_only_leaves_out(suites: Path, run: Run) -> None:
    """Slow claims that ``--emad-only`` does not name would not run with ``--emad-all-claims`` either."""
    (suites / "test_model.py").write_text(WAITING)
    result = run("suites", "--emad-only", "EMAD-F1", "--emad-report", "out")
    assert report_of(suites.parents[1] / "out")["notes"] == [
        "skipped 3 claims (EMAD-E12, EMAD-X1, EAD-A1): left out by --emad-only"
    ]
    assert "--emad-all-claims" not in result.stdout.str()
