"""A pytest of its own, for commands that judge many models: one that cannot be loaded takes no other down.

Knows no option by name, and nothing of what a run is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from emad_ref.workers import held


def places(suites: str, parts: Sequence[str] = ()) -> list[str]:
    """The words that name ``parts`` of ``suites``, folders of a path or of a package; all of it where none is named."""
    if Path(suites).exists():
        return [str(Path(suites, part)) for part in parts] or [suites]
    return ["--pyargs", *([f"{suites}.{part}" for part in parts] or [suites])]


def command(asked: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """The words of a pytest that is ``asked`` these, with ``--emad-NAME=VALUE`` for each of ``options``.

    One word each: pytest takes a folder that stands alone for a test path.
    """
    return [*asked, *(f"--emad-{name}={value}" for name, value in options.items())]


def status(words: Sequence[str], log: Path, seconds: float | None = None) -> int:
    """Exit status of a pytest of these ``words``; all that it says goes to ``log``.

    Raises:
        subprocess.TimeoutExpired: it was ended after ``seconds``.
    """
    return held.status("pytest", words, log, seconds)
