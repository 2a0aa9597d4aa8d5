"""Run a page's blocks in order, in a folder that looks like a checkout after README's install."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.pages.blocks import ROOT, Block

COLUMNS = "96"  # width that GitHub shows without a scroll bar
NEEDED = ("suites", "golden", "examples", "pyproject.toml", "constraints.txt")
DROPPED = re.compile(r"CI$|GITHUB_|PYTEST_|PYTHON|VIRTUAL_ENV$")
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
MAIN_JOB = re.compile(r".*&& ", re.DOTALL)  # installations precede the commands that run
SUMMARY = re.compile(r"^=+ emad\b", re.MULTILINE)


def checkout(folder: Path) -> Path:
    """Make ``folder`` a reader's checkout: suites, goldens, examples, and ``.venv`` with this interpreter."""
    for name in NEEDED:
        source = ROOT / name
        if name == "suites":  # read-only, and the project would not be recognised in a copy
            (folder / name).symlink_to(source)
        elif source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    return folder


def run(block: Block, folder: Path) -> tuple[int, str]:
    """Return exit status and output of one block in ``folder``; a Python block raises its own exception."""
    return _python(block, folder) if block.language == "python" else _shell(block.text, folder)


def run_main_job(block: Block, folder: Path) -> tuple[int, str]:
    """Run README's first command without the installation before it."""
    return _shell(MAIN_JOB.sub("", block.text), folder)


def lay_down(block: Block, folder: Path) -> None:
    target = folder / block.mark.removeprefix("file: ")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(block.text + "\n", encoding="utf-8")


def summary_of(printed: str) -> str:
    """Return the end of a suite run, from our first table. Raises ValueError without one."""
    if (found := SUMMARY.search(printed)) is None:
        raise ValueError(f"no table of emad in what was printed:\n{printed[-2000:]}")
    return printed[found.start() :].rstrip()


def alike(shown: str, printed: str, near: float = 0.02) -> bool:
    """Return whether words are equal and numbers within ``near``, relative from 1 on: machines round differently."""
    words = [NUMBER.sub("0", text).split() for text in (shown, printed)]
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(text)] for text in (shown, printed)]
    return words[0] == words[1] and all(abs(a - b) <= near * max(abs(a), 1.0) for a, b in zip(*numbers, strict=True))


def environment() -> dict[str, str]:
    """Return this process's environment without the variables of the outer run; offline."""
    kept = {name: value for name, value in os.environ.items() if not DROPPED.match(name)}
    return kept | {
        "COLUMNS": COLUMNS,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
    }


def _shell(text: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def _python(block: Block, folder: Path) -> tuple[int, str]:
    """Run in this process, which has imported torch; in ``folder``, as a reader's own file would."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(compile(block.text, f"block at line {block.line}", "exec"), {"__name__": "__main__"})
    return 0, printed.getvalue()
