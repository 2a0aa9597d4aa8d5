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

COLUMNS = "96"  # what GitHub shows without a scroll bar
NEEDED = ("suites", "golden", "examples", "pyproject.toml", "constraints.txt")
DROPPED = re.compile(r"CI$|GITHUB_|PYTEST_|PYTHON|VIRTUAL_ENV$")
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
MAIN_JOB = re.compile(r".*&& ", re.DOTALL)  # what installs stands before what is run
SUMMARY = re.compile(r"^=+ emad\b", re.MULTILINE)


def checkout(folder: Path) -> Path:
    """``folder`` with what a reader's checkout has: suites, goldens, examples, and ``.venv`` with this interpreter."""
    for name in NEEDED:
        source = ROOT / name
        if name == "suites":  # nothing writes there, and a copy would not be known as the project's own
            (folder / name).symlink_to(source)
        elif source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    return folder


def run(block: Block, folder: Path) -> tuple[int, str]:
    """Exit status and output of one block in ``folder``; a Python block raises what it raises."""
    return _python(block, folder) if block.language == "python" else _shell(block.text, folder)


def run_main_job(block: Block, folder: Path) -> tuple[int, str]:
    """README's first command without the installation that precedes it."""
    return _shell(MAIN_JOB.sub("", block.text), folder)


def lay_down(block: Block, folder: Path) -> None:
    target = folder / block.mark.removeprefix("file: ")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(block.text + "\n", encoding="utf-8")


def summary_of(printed: str) -> str:
    """The end of a suite run, from its first table of ours on. Raises ValueError where there is none."""
    if (found := SUMMARY.search(printed)) is None:
        raise ValueError(f"no table of emad in what was printed:\n{printed[-2000:]}")
    return printed[found.start() :].rstrip()


def alike(shown: str, printed: str, near: float = 0.02) -> bool:
    """Whether words are equal, and numbers within ``near``, relative from 1 on: machines round differently."""
    words = [NUMBER.sub("0", text).split() for text in (shown, printed)]
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(text)] for text in (shown, printed)]
    return words[0] == words[1] and all(abs(a - b) <= near * max(abs(a), 1.0) for a, b in zip(*numbers, strict=True))


def environment() -> dict[str, str]:
    """This process's, without what an outer run would tell an inner one; offline."""
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
    """In this process, which has torch already; in ``folder``, as a reader's own file would be."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(compile(block.text, f"block at line {block.line}", "exec"), {"__name__": "__main__"})
    return 0, printed.getvalue()
