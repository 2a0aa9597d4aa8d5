"""A program that may take so many seconds, or any; with it ends whatever it started, also in sessions of its own.

It stays in the group of whoever runs it: what interrupts or ends that group ends both. One that is out of time is
interrupted first, so that it can close what it opened, and killed after ``GRACE_S``: with its children, whom it may
have put in groups of their own, as decoders behind ``exec:`` are. Linux tells who they are (``/proc``); elsewhere they
are left to find that nobody reads them any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0  # for finally blocks, and for what they wait for themselves
PROCESSES = Path("/proc")


def status(
    command: Sequence[str],
    output: Path,
    seconds: float | None,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> int:
    """Its exit status, a signal as its negative; all that it prints goes to ``output``, its input is nobody's.

    ``seconds`` None: as long as it takes. ``descriptors``: open files that it gets beside those three.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``, and was ended.
    """
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=descriptors,
        )
        try:
            return process.wait(seconds)
        finally:
            if process.returncode is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    started: dict[int, int] = {}
    try:
        started |= _opened(descendants(process.pid))
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        started |= _opened(descendants(process.pid) - set(started))
    finally:
        process.kill()
        for descriptor in started.values():
            with suppress(ProcessLookupError):  # it has gone by itself
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        process.wait()


def descendants(ancestor: int) -> set[int]:
    """Ids of its children, of theirs, and so on; none where the system has no ``/proc``."""
    parents = {int(folder.name): _parent(folder) for folder in PROCESSES.glob("[0-9]*")}
    found, youngest = set[int](), {ancestor}
    while youngest := {child for child, parent in parents.items() if parent in youngest} - found:
        found |= youngest
    return found


def _parent(folder: Path) -> int | None:
    try:
        said = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it ended while the list was read
        return None
    return int(said.rpartition(")")[2].split()[1])  # the program's name, in brackets, may hold anything


def _opened(ids: set[int]) -> dict[int, int]:
    """Id → a descriptor that stands for this very process: an id may be another's by the time it is sent a signal."""
    found = {}
    for each in ids:
        with suppress(ProcessLookupError):
            found[each] = os.pidfd_open(each)
    return found
