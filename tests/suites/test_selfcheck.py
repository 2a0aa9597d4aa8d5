"""``--emad-selfcheck``: the check meant for a planted decoder catches it, and no check fails an honest one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_emad.mutants.catalogue import CATALOGUE, select_one_of_each_kind
from pytest_emad.mutants.mutant import RUN, VERIFY, Mutant
from pytest_emad.report import mutation_results
from pytest_emad.report.deselection import NO_PAIR, list_shipped_tests, suite_folder_names
from pytest_emad.report.mutation_results import CheckComplaint, MutationResult, premise_unavailable_reason
from pytest_emad.run import selfcheck as selfcheck_of_plugin
from tests.suites.conftest import ROOT, SUITES, text_of

CAUGHT_HERE = (
    "kv-of-other-rows", "judge-weight", "exits-process", "refuses-everything", "skips", "forges-outcomes"
)  # fmt: skip
USAGE = pytest.ExitCode.USAGE_ERROR


def selfcheck(pytester: pytest.Pytester, *more: object) -> pytest.RunResult:
    """Run the command in a subprocess: the catalogue's processes are forked from one that it starts."""
    return pytester.runpytest_subprocess(f"-c{ROOT / 'pyproject.toml'}", SUITES, *map(str, more))


@pytest.mark.parametrize("planted", [CAUGHT_HERE[:4], pytest.param(CAUGHT_HERE, marks=pytest.mark.slow)], ids=len)
def test_planted_decoders_are_caught_and_honest_ones_are_not(
    pytester: pytest.Pytester, tiny: Path, planted: tuple[str, ...]
) -> None:
    result = selfcheck(pytester, "--emad-model", tiny, f"--emad-selfcheck={','.join(planted)}", "--emad-report", "out")
    assert result.ret == 0, text_of(result)
    written = json.loads((pytester.path / "out" / "selfcheck.json").read_text(encoding="utf-8"))
    found = {one["name"]: one for one in written["results"]}
    assert {name: one["outcome"] for name, one in found.items()} == dict.fromkeys(planted, "caught")
    assert all(one["by"] == CATALOGUE[name].expected_detector for name, one in found.items())
    assert "row " in found["kv-of-other-rows"]["message"]
    assert "position " in found["kv-of-other-rows"]["message"]
    assert (pytester.path / "out" / "selfcheck.txt").read_text(encoding="utf-8").count("\n") > len(planted)
    result.stdout.fnmatch_lines([f"1/{len(planted)} *: caught by *", f"emad selfcheck: {len(planted)} caught"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--emad-selfcheck=honset",), "--emad-selfcheck='honset', but expected meant, all, kinds, or names"),
        (("--emad-selfcheck", "--emad-model", "a", "--emad-model", "b"), "one model beside --emad-selfcheck"),
        (("--emad-selfcheck", "--emad-dtype", "int3"), "--emad-dtype"),
    ],
)
def test_what_cannot_be_checked_is_one_clear_error(
    pytester: pytest.Pytester, options: tuple[str, ...], said: str
) -> None:
    result = pytester.runpytest_inprocess(f"-c{ROOT / 'pyproject.toml'}", SUITES, *options)
    assert result.ret == USAGE
    assert said in text_of(result)


# ---------------------------------------------------------------- the catalogue


def test_every_entry_names_a_test_that_is_shipped() -> None:
    shipped, suites = set(list_shipped_tests()), set(suite_folder_names())
    for planted in CATALOGUE.values():
        asked = planted.test.split()
        assert set(asked) <= suites if planted.is_honest else f"suites/{planted.test}" in shipped, planted.name
        assert planted.expected_detector in (RUN, VERIFY, f"suites/{planted.test}")
        assert planted.does


def test_there_are_many_of_many_kinds() -> None:
    kinds = {planted.kind for planted in CATALOGUE.values()}
    assert sum(not planted.is_honest for planted in CATALOGUE.values()) >= 50
    assert {planted.kind for planted in select_one_of_each_kind()} == kinds
    assert len(select_one_of_each_kind()) == len(kinds) >= 15


# ---------------------------------------------------------------- result of one planted decoder

ENTRY = CATALOGUE["kv-fills-of-zeros"]
COPYING, EAGER = (f"{ENTRY.expected_detector}[m-{case}]" for case in ("copying", "eager"))
SAID = "Failed: audit golden: row 1, new token 4: 3 (2), but the golden has 5 (2)"


def outcome(planted: Mutant, tmp_path: Path, *complaints: CheckComplaint) -> str:
    (tmp_path / "report.json").write_text(
        json.dumps({"schema": 1, "notes": [], "models": [], "claims": [], "points": [], "tables": [], "goldens": [],
                    "settings": {}, "provenance": {}})
    )  # fmt: skip
    return mutation_results.classify_mutant_run(planted, complaints, tmp_path)[0]


def test_only_the_check_that_is_meant_catches(tmp_path: Path) -> None:
    meant = CheckComplaint(ENTRY.expected_detector, COPYING, SAID)
    assert outcome(ENTRY, tmp_path, meant) == mutation_results.CAUGHT
    wrapped = replace(meant, message=SAID.replace(" ", "\n"))
    assert outcome(ENTRY, tmp_path, wrapped) == mutation_results.CAUGHT, "a gate's message is as wide as a terminal"
    assert outcome(ENTRY, tmp_path, replace(meant, nodeid=EAGER)) == mutation_results.CAUGHT_ELSEWHERE
    assert outcome(ENTRY, tmp_path, replace(meant, by="suites/other.py::test")) == mutation_results.CAUGHT_ELSEWHERE
    assert (
        outcome(ENTRY, tmp_path, replace(meant, message="RuntimeError: out of memory"))
        == mutation_results.CAUGHT_ELSEWHERE
    )
    assert outcome(ENTRY, tmp_path) == mutation_results.NOT_CAUGHT


def test_nobody_may_complain_of_an_honest_one(tmp_path: Path) -> None:
    honest = CATALOGUE["honest"]
    assert outcome(honest, tmp_path) == mutation_results.GREEN
    assert outcome(honest, tmp_path, CheckComplaint(RUN, "", "a gap")) == mutation_results.FALSE_ALARM


def test_what_has_no_room_is_told_apart(tmp_path: Path) -> None:
    said = CheckComplaint("anything", "", "MutantNotApplicable: the window of 48 is too short")
    assert outcome(ENTRY, tmp_path, said) == mutation_results.ABSENT


def test_a_check_that_has_no_premise_here_is_told_apart() -> None:
    """No pair of models, or a claim that does not apply to them; a claim that the decoder declined is another case."""
    speculation, answers = CATALOGUE["speculation-unverified"], CATALOGUE["answers-where-scored"]
    left_out = {"shipped": speculation.expected_detector, "why": NO_PAIR}
    empty: dict[str, Any] = {"notes": [], "claims": [], "tests": [], "deselected": []}
    assert premise_unavailable_reason(speculation, empty | {"deselected": [left_out]}) == NO_PAIR
    assert premise_unavailable_reason(speculation, empty) == ""
    assert premise_unavailable_reason(speculation, empty | {"deselected": [left_out, left_out | {"why": "-k"}]}) == ""
    verdict = {"id": answers.case, "verdict": "not applicable", "reason": "random weights", "refused": None}
    ran = empty | {"tests": [{"shipped": answers.expected_detector}]}
    assert premise_unavailable_reason(answers, ran | {"claims": [verdict]}) == "EMAD-F1: random weights"
    assert premise_unavailable_reason(answers, ran | {"claims": [verdict | {"refused": "busy"}]}) == ""
    assert premise_unavailable_reason(answers, ran | {"claims": [verdict | {"verdict": "survived"}]}) == ""


def test_a_run_that_does_not_end_is_no_accusation(
    monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester, tmp_path: Path
) -> None:
    monkeypatch.setattr(selfcheck_of_plugin, "LIMIT_S", 0.01)
    config = pytester.parseconfigure(f"-c{ROOT / 'pyproject.toml'}", "--emad-model", "emad-nano")
    found = selfcheck_of_plugin._check_mutant(config, CATALOGUE["honest"], tmp_path / "1", False)
    assert (found.outcome, found.is_expected, found.by) == (mutation_results.UNFINISHED, False, "")
    assert found.message.startswith("stopped after 0.01 s")


def test_one_that_is_not_as_it_should_be_fails_the_run() -> None:
    one = MutationResult("a", "k", "does", "meant", mutation_results.CAUGHT, "meant", "said", 1.0)
    absent = replace(one, outcome=mutation_results.ABSENT)
    assert mutation_results.are_results_as_expected([one, absent])
    assert not mutation_results.are_results_as_expected([absent])
    for wrong in (mutation_results.CAUGHT_ELSEWHERE, mutation_results.NOT_CAUGHT, mutation_results.FALSE_ALARM):
        assert not mutation_results.are_results_as_expected([one, replace(one, outcome=wrong)])
