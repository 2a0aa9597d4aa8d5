"""Run a module as a child process with a time limit; it ends with its parent.

Each child leads a session of its own. Ctrl-C reaches the parent alone, which interrupts the child, so that it can clean
up, and kills it after ``GRACE_S`` with all that it started.

A daemon survives: a process that has left its session and whose parent has exited. Nothing links it to the child any
more. If this process is killed, processes in further sessions survive, too, unless they notice it themselves: a child
of this module watches its parent, and a decoder behind ``exec:`` reads the end of its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0  # seconds for finally blocks and their own waits
# A killed parent cannot clean up, so the child reads a pipe that the parent holds open: the read returns at its death.
CHILD_CODE = """import json, os, runpy, signal, sys, threading
end, path, module = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]
sys.path[:] = path or sys.path
threading.Thread(target=lambda: (os.read(end, 1), os.killpg(0, signal.SIGKILL)), daemon=True).start()
runpy.run_module(module, run_name="__main__", alter_sys=True)"""


def run_module_for_status(
    module: str,
    words: Sequence[str],
    log: Path,
    seconds: float | None = None,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    path: Sequence[str] | None = None,
) -> int:
    """Run ``python -m module words…`` and return its exit status, −n for signal n. Its input is empty.

    Parameters
    ----------
    log
        File for its output and errors.
    seconds
        Time limit; None: no limit.
    folder, environment, path
        Its current folder, environment variables and import path (``sys.path``); None: those of any new process.

    Raises
    ------
    subprocess.TimeoutExpired
        It took longer than ``seconds`` and was killed.
    """
    end, held = os.pipe()
    try:
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD_CODE, str(end), json.dumps(path), module, *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[end],
                start_new_session=True,
            )
        try:
            return process.wait(seconds)
        except BaseException:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            raise
        finally:
            kill_process_tree(process)
    finally:
        os.close(end)
        os.close(held)


def kill_process_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its session, and all that it started; reap it.

    These are its descendants, in any session, while it runs; and its process group, also after its end.
    """
    import psutil  # every pytest run imports this module, and few kill

    if process.poll() is None:
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has exited, or belongs to another user now
                descendant.kill()
    with suppress(ProcessLookupError, PermissionError):  # nothing is left; on macOS nothing but zombies
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
