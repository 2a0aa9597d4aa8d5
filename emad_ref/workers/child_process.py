"""A program in a process of its own, with a time limit; it ends with all that it started, and with its parent.

It stays in the group of its parent: what interrupts or ends that group ends both. A program that is out of time is
interrupted first, so that it can close what it opened, and killed after ``GRACE_S`` with all that it started, also in
sessions of their own (``supervisor``: on Linux; elsewhere those find that nobody reads them any more).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from emad_ref.workers import supervisor

GRACE_S = 5.0  # for finally blocks, and for what they wait for themselves
# The child reads a pipe whose other end its parent holds: when the parent dies, however that happens, the read returns.
CHILD_CODE = """import os, runpy, sys, threading
end, module = int(sys.argv.pop(1)), sys.argv.pop(1)
threading.Thread(target=lambda: (os.read(end, 1), os._exit(1)), daemon=True).start()
runpy.run_module(module, run_name="__main__", alter_sys=True)"""


def run_module(
    module: str, words: Sequence[str], log: Path, seconds: float | None = None, folder: Path | None = None
) -> int:
    """Exit status of ``python -m module words…`` in ``folder``; its output goes to ``log``, and it ends with us.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``, and was ended.
    """
    end, held = os.pipe()
    try:
        line = [sys.executable, "-c", CHILD_CODE, str(end), module, *words]
        return run_command(line, log, seconds, folder=folder, descriptors=[end])
    finally:
        os.close(end)
        os.close(held)


def run_command(
    command: Sequence[str],
    output: Path,
    seconds: float | None,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> int:
    """Exit status of ``command``, a signal as its negative; its output goes to ``output``, its input is empty.

    ``seconds`` None: as long as it takes. ``descriptors``: open files that it inherits beside those three.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``, and was ended.
    """
    with open(output, "wb") as file:
        process = subprocess.Popen(
            supervisor.supervised_command(command),
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
                _interrupt_and_kill(process)


def _interrupt_and_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.send_signal(supervisor.INTERRUPT if supervisor.is_available() else signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        supervisor.kill_process(process)
