"""Modules as processes: what they say and how they end, in time, out of time, and without whoever waited for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emad_ref.workers import child_process, supervisor
from tests.unit.workers.test_bounded import HEARS, STARTS, gone

WAITS = (
    "from pathlib import Path; from emad_ref.workers import child_process; "
    "child_process.run_module('mine', [], Path('log'))"
)


@pytest.fixture(autouse=True)
def found_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))


def test_the_status_what_was_said_and_where(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os, sys; print(os.getcwd(), *sys.argv[1:]); sys.exit(7)")
    assert child_process.run_module("mine", ["a", "b"], tmp_path / "log", folder=tmp_path) == 7
    assert (tmp_path / "log").read_text() == f"{tmp_path} a b\n"


@pytest.mark.skipif(not supervisor.is_available(), reason="the system does not tell whose children there are")
def test_one_out_of_time_ends_with_all_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STARTS.format(HEARS))
    with pytest.raises(subprocess.TimeoutExpired):
        child_process.run_module("mine", [], tmp_path / "log", 3.0)
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert "closed" in rest
    assert all(gone(each) for each in map(int, first.split()))


def test_it_ends_when_whoever_waits_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    waiting = subprocess.Popen([sys.executable, "-c", WAITS], cwd=tmp_path)
    log = tmp_path / "log"
    for _ in range(1000):
        if log.exists() and log.read_text().endswith("\n"):
            break
        time.sleep(0.01)
    waiting.send_signal(signal.SIGKILL)
    waiting.wait()
    assert gone(int(log.read_text()))
