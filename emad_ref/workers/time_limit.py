"""A program that may take so many seconds, or any; with it ends whatever it started, also in sessions of its own.

It stays in the group of whoever runs it: what interrupts or ends that group ends both. One that is out of time is
interrupted first, so that it can close what it opened, and killed after ``GRACE_S`` with all that it started
(``supervisor``: on Linux; elsewhere those are left to find that nobody reads them any more).
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from emad_ref.workers import supervisor

GRACE_S = 5.0  # for finally blocks, and for what they wait for themselves


def run_command(
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
