"""A Python module as a process that does not outlive whoever waits for it, however that ends.

Whoever is killed ends nothing itself. It holds one end of a pipe, which the system closes for it, and the process looks
at the other: what is started again afterwards finds nobody at work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from emad_ref.workers import time_limit

CHILD_CODE = """import os, runpy, sys, threading
end, module = int(sys.argv.pop(1)), sys.argv.pop(1)
threading.Thread(target=lambda: (os.read(end, 1), os._exit(1)), daemon=True).start()
runpy.run_module(module, run_name="__main__", alter_sys=True)"""


def run_module(
    module: str, words: Sequence[str], log: Path, seconds: float | None = None, folder: Path | None = None
) -> int:
    """Exit status of ``python -m module words…``, started in ``folder``; all that it says goes to ``log``.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``, and was ended (``bounded``).
    """
    end, held = os.pipe()
    line = [sys.executable, "-c", CHILD_CODE, str(end), module, *words]
    try:
        return time_limit.run_command(line, log, seconds, folder=folder, descriptors=[end])
    finally:
        os.close(end)
        os.close(held)
