"""A pytest of its own, for commands that judge many models: one that cannot be loaded takes no other down.

Knows no option by name, and nothing of what a run is for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

JUDGED = (0, 1)  # pytest's statuses of a run that reached its verdicts


def places(suites: str, parts: Sequence[str] = ()) -> list[str]:
    """The words that name ``parts`` of ``suites``, folders of a path or of a package; all of it where none is named."""
    if Path(suites).exists():
        return [str(Path(suites, part)) for part in parts] or [suites]
    return ["--pyargs", *([f"{suites}.{part}" for part in parts] or [suites])]


def command(asked: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """The command line of a pytest that is ``asked`` these words, with ``--emad-NAME=VALUE`` for each of ``options``.

    One word each: pytest takes a folder that stands alone for a test path.
    """
    return [sys.executable, "-m", "pytest", *asked, *(f"--emad-{name}={value}" for name, value in options.items())]


def status(line: Sequence[str], log: Path, seconds: float | None = None) -> int:
    """pytest's exit status; all that it says goes to ``log``.

    Raises:
        subprocess.TimeoutExpired: it was ended after ``seconds``.
    """
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False)
    return done.returncode
