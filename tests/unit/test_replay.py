"""``emad replay`` runs one row of a report again, from the arguments that the report stores."""

from __future__ import annotations

import argparse
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from pytest_emad.audit.finding import AuditRefutedError, Tally
from pytest_emad.audit.trajectory import Judge, Trajectory
from pytest_emad.cli.replay import (
    build_environment,
    build_pytest_arguments,
    compare_results,
    describe_failing_input,
    describe_recorded_test,
    describe_version_differences,
    find_test_id,
    format_comparison,
    replay_test,
    require_repeatable,
)
from tests.unit.report.test_summary import claim, report

FORCED = "suites/invariants/test_kv.py::test_forced[full depth]"
F1 = "suites/claims/test_model.py::test_claim[m-EMAD-F1]"
SAMPLE = {"point": "emad m=0.00", "row": "row 1", "tokens": [5, 6], "first": 1, "depths": [4], "forced": True}


@pytest.fixture
def judged() -> dict[str, Any]:
    tests = [
        {"nodeid": FORCED, "outcome": "failed", "reason": "Failed: logits off\nand more"},
        {"nodeid": FORCED.replace("full", "least"), "outcome": "passed", "reason": ""},
        {"nodeid": F1, "outcome": "failed", "reason": ""},
    ]
    audits = [{"test": FORCED, "check": "forced", "passed": False, "detail": "logits off by 2", "sample": SAMPLE}]
    found = report(
        [claim("EMAD-F1", "falsified", test=F1)], tests=tests, audits=audits, settings={"seed": 3}, provenance={}
    )
    return dict(found)


def test_a_row_is_named_by_claim_or_by_part_of_a_node_id(judged: dict[str, Any]) -> None:
    assert find_test_id(judged, "EMAD-F1") == F1
    assert find_test_id(judged, "emad-f1") == F1, "case does not matter, as in --emad-only"
    assert find_test_id(judged, "test_forced") == FORCED, "the only one that failed"
    assert find_test_id(judged, "least") == FORCED.replace("full", "least")
    with pytest.raises(BadArgument, match="3 contain it, of which 2 failed"):
        find_test_id(judged, "test_")
    with pytest.raises(BadArgument, match="nearest: EMAD-F1"):
        find_test_id(judged, "EMAD-F2")
    with pytest.raises(BadArgument, match=r"a claim or test of this report; its claims: EMAD-F1$"):
        find_test_id(judged, "xyz")
    with pytest.raises(BadArgument, match="nearest: test_forced, test_claim"):
        find_test_id(judged, "test_frced")


def test_what_the_report_knows_is_said_first(judged: dict[str, Any]) -> None:
    assert list(describe_recorded_test(judged, FORCED)) == [
        f"{FORCED}, seed 3",
        "recorded: audit forced: logits off by 2",
        *(f"  {name}: {value}" for name, value in SAMPLE.items()),
        "recorded: failed: Failed: logits off",
    ]
    assert "  found 53.5 % [48.6 %, 58.3 %] accuracy drop; needs at most 1.00 %; where: batch 4" in list(
        describe_recorded_test(judged, F1)
    )


def test_the_recorded_arguments_are_repeated_and_outputs_of_the_ini_file_redirected() -> None:
    recorded = {"arguments": ["--emad-seed=3", "suites/"]}
    words = build_pytest_arguments(recorded, Path("away/asked.json"), Path("new"))
    assert words[:4] == ["--emad-seed=3", "suites/", "--emad-replay=away/asked.json", "--emad-report=new"]
    assert words[4:] == ["-o", "addopts=", "-o", "cache_dir=away/cache", "-o", "log_file="]
    recorded["arguments"] += ["-p", "no:cacheprovider", "-p", "no:logging"]
    assert build_pytest_arguments(recorded, Path("asked.json"), Path("new"))[-2:] == ["-o", "addopts="]


def test_the_environment_has_the_recorded_plugins_and_no_further_option_or_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTEST_ADDOPTS", "GITHUB_STEP_SUMMARY", "PYTEST_PLUGINS"):
        monkeypatch.setenv(name, "now")
    monkeypatch.setenv("OTHER", "stays")
    environment = build_environment({"environment": {"PYTEST_PLUGINS": "then", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": None}})
    assert (environment["PYTEST_PLUGINS"], environment["OTHER"]) == ("then", "stays")
    assert not environment.keys() & {"PYTEST_ADDOPTS", "GITHUB_STEP_SUMMARY", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"}


def test_a_report_without_one_run_or_folder_is_refused(judged: dict[str, Any], tmp_path: Path) -> None:
    judged["run"]["replay"] = None
    with pytest.raises(BadArgument, match=r"says how its run was started; name the folder of one run"):
        require_repeatable(judged, tmp_path)
    judged["run"]["replay"] = {"folder": str(tmp_path / "gone")}
    with pytest.raises(BadArgument, match=r"its run's folder .*gone to exist; restore the folder"):
        require_repeatable(judged, tmp_path)
    judged["run"]["replay"] = {"folder": str(tmp_path)}
    assert require_repeatable(judged, tmp_path) == {"folder": str(tmp_path)}


@pytest.mark.parametrize("named", ["", "report.json"])
def test_a_replay_keeps_nothing_in_the_folder_of_the_report(tmp_path: Path, named: str) -> None:
    with pytest.raises(BadArgument, match=r"--keep.*another folder than that of REPORT"):
        replay_test(argparse.Namespace(report=tmp_path / named, row="EMAD-F1", keep=tmp_path / ".", pdb=False))


def compared(recorded: dict[str, Any], replayed: dict[str, Any], test: str) -> list[str]:
    return [format_comparison(one) for one in compare_results(recorded, replayed, test)]


def test_a_replay_ends_with_what_was_recorded_and_found(judged: dict[str, Any]) -> None:
    repaired = deepcopy(judged)
    assert compared(judged, repaired, FORCED) == [
        "As recorded.\n  recorded: failed: Failed: logits off\n  replayed: failed: Failed: logits off"
    ]
    repaired["tests"][0] |= {"outcome": "passed", "reason": ""}
    repaired["claims"][0] |= {"verdict": "survived", "estimate": 0.002, "interval": None}
    assert compared(judged, repaired, FORCED) == [
        "Not as recorded.\n  recorded: failed: Failed: logits off\n  replayed: passed"
    ]
    (told,) = compared(judged, repaired, F1)
    assert told.startswith("Not as recorded.\n  recorded: EMAD-F1, falsified: found 53.5 % [48.6 %, 58.3 %]")
    assert "\n  replayed: survived: found 0.20 % accuracy drop" in told
    repaired["tests"], repaired["claims"] = [], []
    for test, said in ((FORCED, "replayed: did not run"), (F1, "replayed: not decided")):
        (one,) = compare_results(judged, repaired, test)
        assert said in format_comparison(one)
        assert not one.as_recorded


def test_a_replay_by_another_version_says_so(judged: dict[str, Any]) -> None:
    now = deepcopy(judged)
    now["decoder"]["name"] = "mine 1.2"
    now["provenance"] = {"versions": {"pytest-emad": "9.9"}}
    before = judged | {"provenance": {"versions": {"pytest-emad": "1"}}}
    assert list(describe_version_differences(before, now)) == [
        "Another version: recorded by pytest-emad 1, replayed by 9.9.",
        "Another version of the decoder: mine in the recorded run, mine 1.2 now.",
    ]


def test_a_complaint_keeps_the_shortest_history_on_which_it_holds() -> None:
    point = OperatingPoint("p", "fixed_entropy_point", layers=4, ceiling=4, probes=(2,), thresholds=((1.0,),))
    depths = np.array([4, 2, 3, 1])  # the third rises
    trajectory = Trajectory("row 1", np.arange(10, 16), 2, depths, np.full((4, 1), np.nan), np.zeros(4, dtype=bool))
    tally = Tally("forced")
    with pytest.raises(AuditRefutedError, match="depth must not rise"):
        Judge(tally, None, point, 0.1).require_depths_follow_rule(trajectory, np.zeros((4, 1)))
    assert tally.sample == {
        "point": "p",
        "row": "row 1",
        "tokens": [10, 11, 12, 13, 14],
        "first": 2,
        "depths": [4, 2, 3],
        "forced": True,
    }


def test_a_failing_case_is_shown_as_steps_and_as_requests_that_can_be_sent_by_hand() -> None:
    asked = {"call": "generate", "prompts": [[1, 2]], "max_new": 3, "stop": []}
    sample = {"case": {"rows": "1"}, "steps": ["open full depth", "generate 3 new tokens"], "requests": [asked]}
    assert list(describe_failing_input(sample)) == [
        "  case: {'rows': '1'}",
        "  step 1: open full depth",
        "  step 2: generate 3 new tokens",
        f"  request: {json.dumps(asked)}",
    ]
    sample["requests"] = [asked | {"curl": ["curl -s http://localhost/v1/completions"]}]
    assert list(describe_failing_input(sample))[-1] == "  curl -s http://localhost/v1/completions"
