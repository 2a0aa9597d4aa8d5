"""One run of the suites on a planted decoder, in a process of its own.

Processes are forked from one that has imported what takes seconds, where the system can fork.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

IMPORTED = ("torch._dynamo", "transformers", "hypothesis.stateful", "scipy.stats", "emad_ref.planted.catalogue")
LIMIT_S = 1800.0  # of one planted decoder: one that hangs is not caught by anybody


def run(arguments: list[str], log: Path) -> None:
    """A pytest of these ``arguments``, all of whose words go to ``log``; ended when it takes too long."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)  # of either kind; typeshed's base class has no Process
    if method == "forkserver":
        context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_pytest, args=(arguments, str(log)))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()


def _pytest(arguments: list[str], log: str) -> None:
    """All that it says goes to ``log``."""
    with open(log, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    raise SystemExit(int(pytest.main(arguments)))
