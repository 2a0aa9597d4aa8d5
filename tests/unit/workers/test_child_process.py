"""Child processes: status, output and time limits; no descendant outlives them or their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emad_ref.workers import child_process, supervisor

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


def status(program: str, output: Path, seconds: float) -> int:
    return child_process.run_command_for_status(
        [sys.executable, "-c", program], output, seconds, folder=output.parent, environment=os.environ
    )


@pytest.mark.parametrize(("ends", "expected"), [("3", 3), ("'no'", 1), ("0", 0)])
def test_the_status_and_what_was_printed(ends: str, expected: int, tmp_path: Path) -> None:
    program = f"import sys; print(sys.stdin.read() or 'nobody speaks', flush=True); sys.exit({ends})"
    assert status(program, tmp_path / "said", 30) == expected
    assert (tmp_path / "said").read_text().startswith("nobody speaks")


@pytest.mark.skipif(not supervisor.is_supervision_available(), reason="the system does not list child processes")
@pytest.mark.parametrize(
    ("listens", "closed"),
    [(HEARS, True), ("signal.signal(signal.SIGINT, signal.SIG_IGN)", False)],
    ids=["hears", "deaf"],
)
def test_one_out_of_time_is_interrupted_and_its_children_end_with_it(
    listens: str, closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also children in their own session; one that ignores the interrupt is killed."""
    monkeypatch.setattr(child_process, "GRACE_S", 0.5)
    said = tmp_path / "said"
    with pytest.raises(subprocess.TimeoutExpired):
        status(STARTS.format(listens), said, 2.0)
    first, *rest = said.read_text().splitlines()
    assert ("closed" in rest) is closed
    for each in map(int, first.split()):
        assert gone(each)


def gone(process: int) -> bool:
    """Return whether it ended within a second: an unreaped child may stay a zombie until its new parent reaps it."""
    for _ in range(100):
        try:
            said = Path(f"/proc/{process}/stat").read_text()
        except FileNotFoundError:
            return True
        if said.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_descendants_are_children_and_theirs() -> None:
    if not supervisor.is_supervision_available():
        assert supervisor.find_descendants(os.getpid()) == set()
        return
    before = supervisor.find_descendants(os.getpid())
    program = "import subprocess; subprocess.run(['sleep', '60'])"
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        for _ in range(500):
            found = supervisor.find_descendants(os.getpid()) - before
            if len(found) == 2:
                break
            time.sleep(0.01)
        assert child.pid in found
        (grandchild,) = found - {child.pid}
        assert supervisor.find_descendants(child.pid) == {grandchild}
    finally:
        os.killpg(child.pid, 9)
        child.wait()


WAITS = """
from pathlib import Path
from emad_ref.workers.child_process import run_module_for_status
run_module_for_status('mine', [], Path('log'))
"""


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))


@pytest.mark.usefixtures("on_path")
def test_a_module_runs_in_a_folder_and_returns_its_status(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os, sys; print(os.getcwd(), *sys.argv[1:]); sys.exit(7)")
    assert child_process.run_module_for_status("mine", ["a", "b"], tmp_path / "log", folder=tmp_path) == 7
    assert (tmp_path / "log").read_text() == f"{tmp_path} a b\n"


@pytest.mark.usefixtures("on_path")
@pytest.mark.skipif(not supervisor.is_supervision_available(), reason="the system does not list child processes")
def test_a_module_out_of_time_ends_with_all_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STARTS.format(HEARS))
    with pytest.raises(subprocess.TimeoutExpired):
        child_process.run_module_for_status("mine", [], tmp_path / "log", 3.0)
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert "closed" in rest
    assert all(gone(each) for each in map(int, first.split()))


@pytest.mark.usefixtures("on_path")
def test_a_module_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
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
