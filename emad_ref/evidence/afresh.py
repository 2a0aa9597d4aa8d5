"""Work in a fresh process, one that was started as this one was: what a host offers, and both ends of it.

A task is pickled into a folder of its own, the host starts a process that reads it there, and what came of it is read
back. The same decoder under test is at hand there because the host starts the process by its own command line. Nothing
here knows what a task measures.

A process that hangs, a decoder that never answers, is ended: after the seconds that a host allows for a start, and
``GENEROUS`` times as long as what it was to measure is expected to take. One that fails, or is ended, is an error that
names what it printed; its folder is kept. Nothing is tried again in this process instead: what was to be measured
afresh would not be.
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import tempfile
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

from emad_ref.errors import EmadError
from emad_ref.evidence.host import Afresh, Host
from emad_ref.files import read_bytes, writing

TASK, RESULT, OUTPUT = "task", "result", "output"  # files of a task's folder
SHOWN = 5  # last lines of the output, in messages
GENEROUS = 10.0  # a process beside busy neighbours may take some times as long; one that hangs takes for ever


class AfreshFailed(EmadError):
    """A process that was started for one task ended without its result."""


class Task(Protocol):
    """Crosses by pickle, as what ``run`` returns does: of a module that both processes can import."""

    def run(self, host: Host) -> Any: ...


def carried_out(afresh: Afresh, task: Task, expected_s: float) -> Any:
    """What ``task.run`` returns in a process of its own.

    Args:
        expected_s: seconds that what it measures takes, as far as this process can tell.

    Raises:
        AfreshFailed: the process ended without a result, or was ended because it took too long.
    """
    assert afresh.start is not None, "whoever hands over has asked whether anybody can"
    folder = Path(tempfile.mkdtemp(prefix="emad-afresh-"))
    _write(folder / TASK, task)
    limit = afresh.allowed_s + GENEROUS * expected_s
    try:
        status = afresh.start(folder / TASK, folder / OUTPUT, limit)
    except subprocess.TimeoutExpired as late:
        how = (
            f"was ended after {limit:.0f} s: {afresh.allowed_s:.0f} s to start in, and {GENEROUS:.0f} times the "
            f"{expected_s:.3g} s in which its requests were expected"
        )
        remedy = "mend what hangs, raise --emad-process-timeout where it only starts slowly"
        raise AfreshFailed(_told(how, folder / OUTPUT, remedy)) from late
    if status != 0 or not (folder / RESULT).exists():
        raise AfreshFailed(_told(_ending(status), folder / OUTPUT, "mend what it names"))
    result = pickle.loads(read_bytes(folder / RESULT, "result"))
    shutil.rmtree(folder)
    return result


def answer(task: Path, host: Host) -> None:
    """In the fresh process: run the task of this file, and leave the result beside it."""
    asked: Task = pickle.loads(read_bytes(task, "task"))
    _write(task.with_name(RESULT), asked.run(host))


def _write(path: Path, what: Any) -> None:
    with writing(path, path.name) as file:
        file.write(pickle.dumps(what))


def _ending(status: int) -> str:
    if status < 0:
        return f"was ended by {Signals(-status).name}"
    return f"ended with status {status}" if status else "ended without a result"


def _told(how: str, output: Path, remedy: str) -> str:
    said = read_bytes(output, "output").decode("utf-8", "replace").splitlines() if output.exists() else []
    last = " / ".join([line.strip() for line in said if line.strip("^~ ")][-SHOWN:]) or "nothing"
    return (
        f"a fresh process {how}, and what it was to measure is not measured; it printed last: {last}; all of it is in "
        f"{output}; {remedy}, or take --emad-budget smoke, which starts none"
    )
