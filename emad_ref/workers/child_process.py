"""Run a program as a child process with a time limit; it dies with its parent, and all its processes with it.

The child stays in its parent's process group, so a signal to the group reaches both. After the time limit the child is
interrupted, so that it can clean up, and killed after ``GRACE_S`` with all processes that it started, in any session
(``supervisor``, on Linux only; elsewhere processes in other sessions survive).
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

GRACE_S = 5.0  # seconds for finally blocks and their own waits
# A killed parent cannot clean up, so the child reads a pipe that the parent holds open: the read returns at its death.
CHILD_CODE = """import os, runpy, sys, threading
end, module = int(sys.argv.pop(1)), sys.argv.pop(1)
threading.Thread(target=lambda: (os.read(end, 1), os._exit(1)), daemon=True).start()
runpy.run_module(module, run_name="__main__", alter_sys=True)"""


def run_module_for_status(
    module: str, words: Sequence[str], log: Path, seconds: float | None = None, folder: Path | None = None
) -> int:
    """Run ``python -m module words…`` in ``folder``, its output in ``log``, and return the exit status.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``, and was killed.
    """
    end, held = os.pipe()
    try:
        line = [sys.executable, "-c", CHILD_CODE, str(end), module, *words]
        return run_command_for_status(line, log, seconds, folder=folder, descriptors=[end])
    finally:
        os.close(end)
        os.close(held)


def run_command_for_status(
    command: Sequence[str],
    output: Path,
    seconds: float | None,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> int:
    """Run ``command`` and return its exit status, −n for signal n; its output goes to ``output``, its input is empty.

    ``seconds`` None: no time limit. ``descriptors``: further open files that it inherits.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``, and was killed.
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
        process.send_signal(supervisor.INTERRUPT if supervisor.is_supervision_available() else signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        supervisor.kill_process_tree(process)
