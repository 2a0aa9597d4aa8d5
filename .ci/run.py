#!/usr/bin/env python3
"""What CI runs: README.md's own commands, from nothing but Python and pip.

The files git knows (tracked, and untracked but not ignored) are copied to an empty folder. There each command that
README.md marks with ``<!-- main-job -->`` or ``<!-- tests -->`` runs as it stands, in an environment of its own, so
that the main job cannot lean on what only the tests install. All environments are made side by side, since pip uses one
core; then the last command of each job runs alone, since the main job times. Exit status 1 if any command fails.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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


def split_job(text: str) -> tuple[str, str]:
    """The commands of a block before its last one, a line each, and the last one."""
    *before, last = text.strip().replace(" && ", "\n").splitlines()
    return "\n".join(before), last


def prepare(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the first commands of a job in a copy of the sources, and keep what they print."""
    venv.create(folder / "python", with_pip=True)
    copy_sources(folder / "checkout")
    return run(text, folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(text: str, folder: Path, **streams: int) -> subprocess.CompletedProcess[str]:
    """Run commands in the copy of the sources, where ``python`` is this interpreter with a bare pip beside it."""
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    environment["PATH"] = f"{folder / 'python' / 'bin'}{os.pathsep}{environment['PATH']}"
    environment["PIP_COMPILE"] = "0"  # a run imports part of what it installs; compiling all of it takes a third
    return subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", text], cwd=folder / "checkout", env=environment, text=True, **streams
    )


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
        return 0
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emad-ci-"))) for _ in commands]
        firsts, lasts = zip(*map(split_job, commands.values()), strict=True)
        with ThreadPoolExecutor() as pool:
            prepared = list(pool.map(prepare, firsts, folders))
        for mark, last, folder, before in zip(commands, lasts, folders, prepared, strict=True):
            print(f"=== {mark}\n{before.stdout}", end="", flush=True)
            done = before if before.returncode else run(last, folder)
            if done.returncode:
                failed.append(f"{mark} (exit status {done.returncode})")
    if failed:
        print(f"FAILED: {', '.join(failed)}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
