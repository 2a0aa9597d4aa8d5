"""A supervisor process: it runs one program, and kills all processes that the program started.

Orphans of the program become children of the supervisor (a subreaper), even if they run in other sessions. So the
supervisor finds all of them below itself in ``/proc`` and kills them before it exits. Only Linux has both. Elsewhere a
program is started without a supervisor, and its processes in other sessions survive.

``supervised_command`` runs this module as a script, with the standard library only. The supervisor ignores SIGINT,
which a terminal also sends to the program, and passes ``INTERRUPT`` on to the program as SIGINT. It exits as the
program exits.
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
INTERRUPT = getattr(signal, "SIGUSR1", signal.SIGINT)  # Windows has no SIGUSR1, and no supervisor either
CHILD_SUBREAPER = 36  # of prctl(2)
KILL_S = 5.0  # for killed processes to disappear; those of other users cannot be killed


def is_supervision_available() -> bool:
    return sys.platform == "linux" and PROCESSES.joinpath("self/stat").exists()


def supervised_command(words: Sequence[str]) -> list[str]:
    """The command line that runs ``words`` under a supervisor; ``words`` itself on systems other than Linux."""
    return [sys.executable, "-IS", __file__, *words] if is_supervision_available() else [*words]


def supervise_program_and_exit(words: list[str]) -> None:
    """Run ``words``; when the program has exited, kill its remaining processes and exit as it did."""
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
    for stream in range(3):  # an open end here would hide that the program has closed its own
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


def kill_process_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of ``supervised_command`` and all processes that it started."""
    if process.poll() is None:
        kill_descendants(process.pid)
        process.kill()
    process.wait()


def kill_descendants(ancestor: int) -> None:
    """Kill all processes below ``ancestor``, and those that they start meanwhile."""
    until = time.monotonic() + KILL_S
    while (found := find_descendants(ancestor)) and time.monotonic() < until:
        for descriptor in open_pidfds(found).values():
            _kill_descriptor(descriptor)


def _kill_descriptor(descriptor: int) -> None:
    """Send SIGKILL to the process of a pidfd, and close the descriptor."""
    with suppress(ProcessLookupError, PermissionError):  # it has exited, or belongs to another user now
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    os.close(descriptor)


def find_descendants(ancestor: int) -> set[int]:
    """Ids of the living children of ``ancestor``, of their children, and so on; none without ``/proc``."""
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
    state, parent = said.rpartition(")")[2].split()[:2]  # the program's name, in brackets, may hold any character
    return None if state in "ZX" else int(parent)


def open_pidfds(ids: set[int]) -> dict[int, int]:
    """Process id → pidfd. An id may belong to another process by the time of a signal; a pidfd never does."""
    found = {}
    for each in ids:
        with suppress(ProcessLookupError):
            found[each] = os.pidfd_open(each)
    return found


if __name__ == "__main__":
    supervise_program_and_exit(sys.argv[1:])
