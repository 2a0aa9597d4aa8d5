"""Judging a real model in parts gives every verdict without a clock of a single run, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_emad import reproduce
from pytest_emad.report.schema import read_report
from pytest_emad.report.suite_parts import model_folder_name
from pytest_emad.run import subprocesses
from pytest_emad.statistics.goldens import MACHINE_BOUND
from pytest_emad.statistics.verdicts import load_register
from tests.suites.conftest import SUITES

PARTS = ["invariants", "fidelity", "claims-rest", "claims-measuring", "cost"]


@pytest.mark.slow
def test_verdicts_are_those_of_one_run(tiny: Path, tmp_path: Path) -> None:
    options = {"model": tiny, "budget": "smoke", "device": "cpu", "report": tmp_path / "at-once"}
    subprocesses.run_pytest(subprocesses.build_pytest_arguments([str(SUITES)], options), tmp_path / "at-once.txt")
    words = ["--suites", str(SUITES), "--budget", "smoke", "--executor", "processes:2"]
    reproduce.main([str(tiny), "--out", str(tmp_path / "out"), *words])
    found, wanted = (
        read_report(place) for place in (tmp_path / "out" / model_folder_name(str(tiny)), tmp_path / "at-once")
    )
    assert list(found["run"]["parts"]) == PARTS
    timed = {name for name, row in load_register().items() if row.requires in MACHINE_BOUND}
    mine, theirs = ({claim["id"]: claim for claim in report["claims"]} for report in (found, wanted))
    assert mine.keys() == theirs.keys()
    assert {name: claim for name, claim in mine.items() if name not in timed} == {
        name: claim for name, claim in theirs.items() if name not in timed
    }
    outcomes, others = ({test["nodeid"]: test["outcome"] for test in report["tests"]} for report in (found, wanted))
    assert outcomes == others
    assert found["deselected"] == wanted["deselected"]
    assert found["run"]["exit_status"] == wanted["run"]["exit_status"]
