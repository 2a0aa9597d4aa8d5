"""Child processes: status, output and time limits; what they started ends with them, and they with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from emad_ref.workers import child_process

# a background process of a shell without job control ignores SIGINT, and so do its children
HEARS = "signal.signal(signal.SIGINT, signal.default_int_handler)"
STARTS = """
import signal, subprocess, sys, time
told = [subprocess.Popen(["sleep", "60"]).pid, subprocess.Popen(["sleep", "60"], start_new_session=True).pid]
{}
print(*told, flush=True)
try:
    time.sleep(60)
finally:
    print("closed", flush=True)
"""


@pytest.fixture(autouse=True)
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))


def status(program: str, folder: Path, seconds: float) -> int:
    (folder / "mine.py").write_text(program)
    return child_process.run_module_for_status("mine", [], folder / "log", seconds)


@pytest.mark.parametrize(("ends", "expected"), [("3", 3), ("'no'", 1), ("0", 0)])
def test_the_status_and_what_was_printed(ends: str, expected: int, tmp_path: Path) -> None:
    program = f"import sys; print(sys.stdin.read() or 'nobody speaks', flush=True); sys.exit({ends})"
    assert status(program, tmp_path, 30) == expected
    assert (tmp_path / "log").read_text().startswith("nobody speaks")


def test_a_signal_is_a_negative_status(tmp_path: Path) -> None:
    assert status("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", tmp_path, 30) == -signal.SIGTERM


def test_a_module_runs_in_a_folder_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os, sys; print(os.getcwd(), *sys.argv[1:]); sys.exit(7)")
    assert child_process.run_module_for_status("mine", ["a", "b"], tmp_path / "log", folder=tmp_path) == 7
    assert (tmp_path / "log").read_text() == f"{tmp_path} a b\n"


def test_environment_and_import_path_are_those_asked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os, sys; print(os.environ['MARK'], sys.path[-1])")
    path, environment = [str(tmp_path), *sys.path, "/nowhere"], {"MARK": "x"}
    child_process.run_module_for_status("mine", [], tmp_path / "log", environment=environment, path=path)
    assert (tmp_path / "log").read_text() == "x /nowhere\n"


@pytest.mark.parametrize(
    ("listens", "closed"),
    [(HEARS, True), ("signal.signal(signal.SIGINT, signal.SIG_IGN)", False)],
    ids=["hears", "deaf"],
)
def test_one_out_of_time_is_interrupted_and_its_children_end_with_it(
    listens: str, closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ignores the interrupt is killed, with children in sessions of their own."""
    monkeypatch.setattr(child_process, "GRACE_S", 5.0 if closed else 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        status(STARTS.format(listens), tmp_path, 3.0)
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert ("closed" in rest) is closed
    same_session, own_session = map(int, first.split())
    assert gone(same_session)
    if not closed:
        assert gone(own_session)
    else:  # a daemon by now: its session is its own, and its parent has exited
        os.kill(own_session, signal.SIGKILL)


def gone(process: int, seconds: float = 10.0) -> bool:
    """Return whether it ends in time: an unreaped child may stay a zombie until its new parent reaps it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


LEAVES = """
import os, time
if not os.fork():
    if not os.fork():
        {}
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(0.5)
"""


@pytest.mark.parametrize("leaves", ["pass", "os.setsid()"], ids=["its parent", "its parent and its session"])
def test_only_a_process_that_leaves_its_parent_and_its_session_survives(leaves: str, tmp_path: Path) -> None:
    assert status(LEAVES.format(leaves), tmp_path, 30) == 0
    left = int((tmp_path / "log").read_text())
    survives = leaves != "pass"
    assert gone(left, 1.0 if survives else 10.0) is not survives
    if survives:
        os.kill(left, signal.SIGKILL)


WAITS = """
from pathlib import Path
from emad_ref.workers.child_process import run_module_for_status
run_module_for_status('mine', [], Path('log'))
"""


def test_a_module_ends_with_what_it_started_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, subprocess, time\nprint(os.getpid(), subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "time.sleep(60)"
    )
    waiting = subprocess.Popen([sys.executable, "-c", WAITS], cwd=tmp_path)
    log = tmp_path / "log"
    for _ in range(3000):
        if log.exists() and log.read_text().endswith("\n"):
            break
        time.sleep(0.01)
    waiting.send_signal(signal.SIGKILL)
    waiting.wait()
    assert all(gone(int(each)) for each in log.read_text().split())


def test_an_interrupt_of_the_parent_reaches_the_child(tmp_path: Path) -> None:
    """The child is in another session, so a terminal's Ctrl-C reaches the parent alone."""
    (tmp_path / "mine.py").write_text(STARTS.format(HEARS))
    heard = f"import signal; {HEARS}\n{WAITS}"
    waiting = subprocess.Popen([sys.executable, "-c", heard], cwd=tmp_path, stderr=subprocess.DEVNULL)
    log = tmp_path / "log"
    for _ in range(3000):
        if log.exists() and log.read_text().endswith("\n"):
            break
        time.sleep(0.01)
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(30) == -signal.SIGINT
    first, *rest = log.read_text().splitlines()
    assert "closed" in rest
    same_session, own_session = map(int, first.split())
    assert gone(same_session)
    os.kill(own_session, signal.SIGKILL)
