"""``emad replay`` runs one row of a report again, from the arguments that the report stores."""

from __future__ import annotations

import argparse
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emad_ref.audit.finding import AuditRefutedError, Tally
from emad_ref.audit.trajectory import Judge, Trajectory
from emad_ref.cli.replay import (
    build_pytest_arguments,
    describe_recorded_test,
    find_test_id,
    replay_comparison_lines,
    replay_test,
)
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
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
    found["run"]["command"] = ["pytest", "suites/", "-n", "2", "--emad-report", "out"]
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
    assert "  found 53.50 % [48.60 %, 58.30 %] accuracy drop; needs at most 1.00 %; where: batch 4" in list(
        describe_recorded_test(judged, F1)
    )


def test_the_run_is_repeated_for_this_test_alone_and_its_report_is_left_as_it_is(
    judged: dict[str, Any], pytester: pytest.Pytester
) -> None:
    words = build_pytest_arguments(judged, FORCED, Path("new"))
    assert words[:5] == judged["run"]["command"][1:]
    assert words[5:] == ["-k", "test_forced[full and depth]", "--emad-report", "new", "-n", "0"]
    pytester.makepyfile(
        "import pytest\n@pytest.mark.parametrize('x', ['full depth', 'least depth'])\ndef test_forced(x): pass"
    )
    pytester.runpytest(*words[5:7]).assert_outcomes(passed=1, deselected=1)


@pytest.mark.parametrize("named", ["", "report.json"])
def test_a_replay_keeps_nothing_in_the_folder_of_the_report(tmp_path: Path, named: str) -> None:
    with pytest.raises(BadArgument, match=r"--keep.*another folder than that of REPORT"):
        replay_test(argparse.Namespace(report=tmp_path / named, row="EMAD-F1", keep=tmp_path / ".", pdb=False))


def test_a_replay_demands_no_other_test(judged: dict[str, Any]) -> None:
    judged["run"]["command"] = [
        "pytest",
        "--emad-expect-decoder",
        "foreign",
        "s",
        "--emad-tier=depth",
        "--emad-seed",
        "3",
    ]
    assert build_pytest_arguments(judged, FORCED, Path("new"))[:3] == ["s", "--emad-seed", "3"]


def test_a_replay_ends_with_what_was_recorded_and_found(judged: dict[str, Any]) -> None:
    repaired = deepcopy(judged)
    assert list(replay_comparison_lines(judged, repaired, FORCED)) == [
        "As recorded.\n  recorded: failed: Failed: logits off\n  replayed: failed: Failed: logits off"
    ]
    repaired["tests"][0] |= {"outcome": "passed", "reason": ""}
    repaired["claims"][0] |= {"verdict": "survived", "estimate": 0.002, "interval": None}
    assert list(replay_comparison_lines(judged, repaired, FORCED)) == [
        "Not as recorded.\n  recorded: failed: Failed: logits off\n  replayed: passed"
    ]
    (told,) = replay_comparison_lines(judged, repaired, F1)
    assert told.startswith("Not as recorded.\n  recorded: EMAD-F1, falsified: found 53.50 % [48.60 %, 58.30 %]")
    assert "\n  replayed: survived: found 0.20 % accuracy drop" in told
    repaired["tests"], repaired["claims"] = [], []
    absent = "The replay found no such test: run it in the folder of the recorded run, with the version that wrote it."
    for test, said in ((FORCED, "replayed: did not run"), (F1, "replayed: not decided")):
        why, agreement = replay_comparison_lines(judged, repaired, test)
        assert why == absent
        assert said in agreement


def test_a_replay_by_another_decoder_or_version_says_so(judged: dict[str, Any]) -> None:
    """In another folder no conftest provides the decoder: the reference decoder would pass instead."""
    now = deepcopy(judged)
    now["decoder"]["name"] = "reference (ours)"
    now["provenance"] = {"versions": {"pytest-emad": "9.9"}}
    version, decoder, agreement = replay_comparison_lines(
        judged | {"provenance": {"versions": {"pytest-emad": "1"}}}, now, F1
    )
    assert version == "Another version: recorded by pytest-emad 1, replayed by 9.9."
    assert decoder.startswith("Another decoder: mine in the recorded run, reference (ours) now; run it in the folder")
    assert agreement.startswith("As recorded.")


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
