"""A process that runs one program and outlives all that the program starts, so that nothing of it is left behind.

The system makes orphans of the program children of the supervisor, also those in sessions of their own. So all of them
are found below the supervisor, in ``/proc``, and killed before the supervisor is. Linux alone has both; elsewhere a
program is started as it is, and what it puts into a session of its own stays behind.

Run as a script by ``command``, without packages: standard library only. The supervisor ignores SIGINT, which a terminal
sends to the program, too; ``INTERRUPT`` it passes on to the program as SIGINT. It ends as the program ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a supervisor starts sooner without it
    import subprocess

PROCESSES = Path("/proc")
INTERRUPT = getattr(signal, "SIGUSR1", signal.SIGINT)  # Windows, which has none, has no supervisor either
CHILD_SUBREAPER = 36  # of prctl(2)
KILL_S = 5.0  # for killed processes to be gone; one that belongs to another user stays


def is_available() -> bool:
    return sys.platform == "linux" and PROCESSES.joinpath("self/stat").exists()


def supervised_command(words: Sequence[str]) -> list[str]:
    """``words`` under a supervisor; ``words`` themselves where there can be none."""
    return [sys.executable, "-IS", __file__, *words] if is_available() else [*words]


def supervise(words: list[str]) -> None:
    """Run ``words``, kill what is left of them once the program has ended, and end as it did."""
    import ctypes

    ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    ignored = {number for number in (signal.SIGINT,) if signal.getsignal(number) is signal.SIG_IGN}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = 0

    def interrupt(*received: object) -> None:
        if program:
            os.kill(program, signal.SIGINT)

    signal.signal(INTERRUPT, interrupt)
    restored = {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ} - ignored
    try:
        program = os.posix_spawn(words[0], words, os.environ, setsigdef=restored)
    except OSError as error:
        sys.exit(f"{words[0]} cannot be started: {error.strerror}")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # its end of a pipe would hide that the program has closed its own
        os.dup2(nothing, stream)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    ended = 0
    while ended != program:
        ended, status = os.wait()
    program = 0
    kill_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """Kill what was started by ``command``, and all that it started."""
    if process.poll() is None:
        kill_descendants(process.pid)
        process.kill()
    process.wait()


def kill_descendants(ancestor: int) -> None:
    """Kill the processes below ``ancestor``, and those that they start meanwhile."""
    until = time.monotonic() + KILL_S
    while (found := descendants(ancestor)) and time.monotonic() < until:
        for descriptor in open_pidfds(found).values():
            _kill_descriptor(descriptor)


def _kill_descriptor(descriptor: int) -> None:
    """SIGKILL to the process that ``descriptor`` stands for; closes it."""
    with suppress(ProcessLookupError, PermissionError):  # it has gone by itself, or is not ours any more
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    os.close(descriptor)


def descendants(ancestor: int) -> set[int]:
    """Ids of its living children, of theirs, and so on; none where the system has no ``/proc``."""
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
    state, parent = said.rpartition(")")[2].split()[:2]  # the program's name, in brackets, may hold anything
    return None if state in "ZX" else int(parent)


def open_pidfds(ids: set[int]) -> dict[int, int]:
    """Id → a descriptor that stands for this very process: an id may be another's by the time it is sent a signal."""
    found = {}
    for each in ids:
        with suppress(ProcessLookupError):
            found[each] = os.pidfd_open(each)
    return found


if __name__ == "__main__":
    supervise(sys.argv[1:])
