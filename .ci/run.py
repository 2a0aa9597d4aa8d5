#!/usr/bin/env python3
"""What CI runs: README.md's own commands, from nothing but Python and pip.

The files git knows (tracked, and untracked but not ignored) are copied to an empty folder. There each command that
README.md marks with ``<!-- main-job -->`` or ``<!-- tests -->`` runs as it stands, in an environment of its own, so
that the main job cannot lean on what only the tests install. Exit status 1 if any command fails.

    .ci/run              both commands, and ``newest``
    .ci/run main-job     one of them
    .ci/run --print      show the commands, run nothing

Before the tests bubblewrap is installed by apt, if this system lets us; without it the tests of confined programs skip.

``newest`` installs the wheels as a user does, without constraints. Only torch is the tested release, which a CPU index
serves without CUDA. Then all suites run on emad-nano. ``oldest`` (``tox -e oldest``) does the same at the floors of
pyproject.toml, with that torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKS = ("main-job", "tests")
RANGES = ("newest", "oldest")  # ends of the range of versions that pyproject.toml allows
INSTALLED_JOB = """\
python3 -m venv .venv
.venv/bin/pip wheel --no-deps --wheel-dir dist . emad_ref/models/weights
.venv/bin/pip install --find-links dist {pinned} 'pytest-emad[suites,models]'
.venv/bin/pip list
.venv/bin/pytest --pyargs pytest_emad.suites --emad-model emad-nano --emad-gate known\
"""
# The last would keep bytecode from the copies: every process would compile torch and transformers anew, for 16 s.
LEFT_OUT = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")


def command(readme: str, mark: str) -> str:
    """The fenced block right after ``<!-- mark -->``; exits unless there is exactly one."""
    blocks = re.findall(rf"<!-- {re.escape(mark)} -->\s*\n```[a-z]*\n(.*?)\n```", readme, flags=re.DOTALL)
    if len(blocks) != 1:
        sys.exit(f"README.md: found {len(blocks)} code blocks marked <!-- {mark} -->, but expected exactly one")
    return blocks[0]


def installed_job(end: str) -> str:
    """Commands that install the wheels at one end of the range of versions, and judge emad-nano."""
    pins = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    if end == "oldest":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        bounds = [*project["dependencies"], *project["optional-dependencies"]["suites"]]
        pins += [bound.replace(">=", "==") for bound in bounds if not bound.startswith("torch>")]
    return INSTALLED_JOB.format(pinned=" ".join(pins))


def copy_sources(target: Path) -> None:
    """Copy what a commit of the working tree would hold; build outputs and environments stay behind."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).is_file():  # a tracked file may have been deleted in the working tree
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run(text: str, folder: Path) -> int:
    """Run one block in a copy of the sources, where ``python`` is this interpreter with a bare pip beside it."""
    venv.create(folder / "python", with_pip=True)
    copy_sources(folder / "checkout")
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    environment["PATH"] = f"{folder / 'python' / 'bin'}{os.pathsep}{environment['PATH']}"
    environment["PIP_COMPILE"] = "0"  # a run imports part of what it installs; compiling all of it takes a third
    return subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", text], cwd=folder / "checkout", env=environment
    ).returncode


def install_bubblewrap() -> None:
    """Install bubblewrap by apt-get, as root or by sudo without a password; print one line if that fails."""
    if shutil.which("bwrap"):
        return
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    # `timeout` ends apt-get also where sudo runs it, whose processes we may not kill
    apt = [*root, "timeout", "150", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=60"]
    for words in (["update"], ["install", "-y", "bubblewrap"]):
        try:
            done = subprocess.run([*apt, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            reason = done.stderr.strip() or f"exit status {done.returncode}" if done.returncode else ""
        except OSError as error:
            reason = str(error)
        if reason:
            last = reason.splitlines()[-1]
            print(f"bubblewrap is not installed, and the tests that need it skip: {last}", flush=True)
            return


def main(arguments: list[str]) -> int:
    only_print = "--print" in arguments
    marks = [argument for argument in arguments if argument != "--print"] or [*MARKS, "newest"]
    if unknown := sorted(set(marks) - {*MARKS, *RANGES}):
        sys.exit(f"{unknown[0]!r}, but expected one of {', '.join((*MARKS, *RANGES))}, --print")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {mark: installed_job(mark) if mark in RANGES else command(readme, mark) for mark in marks}
    if "tests" in marks and not only_print:
        install_bubblewrap()
    failed = []
    for mark, text in commands.items():
        print(f"=== {mark}\n{text}", flush=True)
        if only_print:
            continue
        with tempfile.TemporaryDirectory(prefix="emad-ci-") as folder:
            if status := run(text, Path(folder)):
                failed.append(f"{mark} (exit status {status})")
    if failed:
        print(f"FAILED: {', '.join(failed)}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
