"""``.ci/run`` runs the README's own commands, so that the two cannot differ."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

README = """
<!-- main-job -->
```sh
test ! -e left && touch left
python -c "import sys; print('main', sys.prefix != sys.base_prefix, sys.dont_write_bytecode)"
```
<!-- tests -->
```
python -m pip --version && test ! -e left && test ! -e ignored && test -e untracked
```
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository with only a README, ``.ci``, an untracked file and an ignored one."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "README.md").write_text(README)
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("ignored", "untracked"):
        (tmp_path / name).touch()
    write_program(tmp_path / "bin/bwrap", "")  # so that no test installs it
    return tmp_path


def write_program(path: Path, lines: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def ci(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``.ci/run`` with the checkout's ``bin``, if it has one, before the system's programs."""
    path = os.pathsep.join([str(checkout / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [checkout / ".ci" / "run", *arguments],
        cwd=checkout,
        env=os.environ | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_commands_run_in_clean_copies_and_one_that_fails_fails_the_job(checkout: Path) -> None:
    """The other command still runs and succeeds. pip takes three seconds, so only the second environment has it."""
    program = checkout / ".ci" / "run.py"
    program.write_text(program.read_text().replace("with_pip=True", "with_pip='-m pip' in text"))
    (checkout / "README.md").write_text(README.replace('bytecode)"\n', 'bytecode)"\nexit 3\n'))
    done = ci(checkout, "main-job", "tests")
    assert done.returncode == 1
    assert "FAILED: main-job (exit status 3)" in done.stdout
    assert "main True False" in done.stdout, "environments keep bytecode"
    assert re.search(r"^pip \d", done.stdout, re.MULTILINE)
    assert "tests (exit status" not in done.stdout
    assert not (checkout / "left").exists()


@pytest.mark.parametrize("readme", ["", README + README])
def test_a_readme_without_exactly_one_block_is_refused(checkout: Path, readme: str) -> None:
    (checkout / "README.md").write_text(readme)
    done = ci(checkout)
    assert done.returncode == 1
    assert "but expected exactly one" in done.stdout


def test_a_job_alone_succeeds(checkout: Path) -> None:
    """No command of the other job runs. Without pip, as above."""
    (checkout / ".ci" / "run.py").write_text((checkout / ".ci" / "run.py").read_text().replace("with_pip=True", ""))
    (checkout / "README.md").write_text(README.replace("python -m pip --version", "python --version"))
    done = ci(checkout, "tests")
    assert done.returncode == 0, done.stdout
    assert "=== main-job" not in done.stdout


@pytest.mark.parametrize(
    ("apt", "user", "said"),
    [
        ('echo "$0 $@" >> "$ASKED"', 0, ""),
        ('echo "$0 $@" >> "$ASKED"', 1000, ""),
        ("echo one >&2; echo Unable to fetch >&2; exit 100", 0, ": Unable to fetch"),
        ("exit 100", 0, ": exit status 100"),
        (None, 0, "No such file or directory"),
    ],
)
def test_bubblewrap_is_installed_where_apt_is_and_else_one_line_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    apt: str | None, user: int, said: str,
) -> None:  # fmt: skip
    spec = importlib.util.spec_from_file_location("ci_run", ROOT / ".ci" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    folder = tmp_path / "bin"
    write_program(folder / "sudo", 'test "$1" = -n && shift && exec "$@"')
    (folder / "timeout").symlink_to(shutil.which("timeout") or "timeout")
    if apt is not None:
        write_program(folder / "apt-get", apt)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    program.install_bubblewrap()
    printed = capfd.readouterr().out
    if said:
        assert printed.startswith("bubblewrap is not installed, and the tests that need it skip: ")
        assert printed.endswith(f"{said}\n")
        assert printed.count("\n") == 1
    else:
        assert printed == ""
        updated, installed = (tmp_path / "asked").read_text().splitlines()
        assert updated.endswith(" update")
        assert installed.endswith(" install -y bubblewrap")


def test_unknown_jobs_are_refused(checkout: Path) -> None:
    done = ci(checkout, "deploy")
    assert done.returncode == 1
    assert "'deploy', but expected one of main-job, tests, newest, oldest" in done.stdout


def test_every_slow_test_is_run_by_an_environment_of_tox() -> None:
    """Tests of ``tests/benchmarks`` are run by hand: a person reads the numbers."""
    commands = [line for line in (ROOT / "tox.ini").read_text(encoding="utf-8").splitlines() if "--run-slow" in line]
    run = [ROOT / path for line in commands for path in re.findall(r"tests/[\w/.]+", line)]
    marked = re.compile(r"mark\.(slow|each_value|values)")
    slow = [path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text(encoding="utf-8"))]
    run += [ROOT / "tests" / "benchmarks", Path(__file__)]
    missing = [path for path in slow if not any(path.is_relative_to(each) for each in run)]
    assert len(slow) > 40
    assert not missing


def test_the_readme_has_both_commands() -> None:
    """The main job installs only the package; the tests install the extra ``test``."""
    done = ci(ROOT, "--print")
    assert done.returncode == 0, done.stdout
    main_job, tests = done.stdout.partition("=== newest")[0].split("=== tests")
    for text in (main_job, tests):
        assert re.search(r"python3? -m venv \.venv", text)
        assert "-c constraints.txt" in text
    assert "pytest suites" in main_job
    assert "[test]" in tests


def test_both_ends_of_the_range_of_versions_have_a_job() -> None:
    """``newest`` pins torch alone; ``oldest`` pins every dependency of the suites to its floor, torch aside."""
    done = ci(ROOT, "--print", "newest", "oldest")
    assert done.returncode == 0, done.stdout
    newest, oldest = (re.findall(r"[\w-]+==\S+", text) for text in done.stdout.split("=== oldest"))
    torch = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest == torch
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = {*project["dependencies"], *project["optional-dependencies"]["suites"]}
    assert {*oldest} - {*torch} == {floor.replace(">=", "==") for floor in floors if not floor.startswith("torch>")}
    assert "[testenv:oldest]" in (ROOT / "tox.ini").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("device", "status"), [("NVIDIA A100-SXM4-80GB", 0), ("NVIDIA H200", 1), ("NVIDIA A10G", 1), (None, 1)]
)
def test_the_a100_environment_refuses_every_other_gpu(tmp_path: Path, device: str | None, status: int) -> None:
    """A stub of torch names its device."""
    stand_in = (
        f"class cuda:\n    is_available = lambda: {device is not None}\n    get_device_name = lambda i: {device!r}\n"
    )
    (tmp_path / "torch.py").write_text(stand_in)
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "require_gpu.py"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "EMAD_GPU": "A100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    if status:
        assert f"needs an NVIDIA A100, found: {device or 'no CUDA device'}" in done.stderr


@pytest.mark.parametrize(
    ("pip", "tests", "said", "status"),
    [
        (1, 0, "economize: skipped: ERROR: No matching distribution found", 0),
        (0, 0, "economize: exit status 0 after", 0),
        (0, 3, "economize: exit status 3 after", 1),
    ],
)
def test_an_engine_that_cannot_be_installed_is_skipped_with_pips_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pip: int,
    tests: int,
    said: str,
    status: int,
) -> None:
    described = importlib.util.spec_from_file_location("engines", ROOT / ".ci" / "engines.py")
    assert described is not None
    assert described.loader is not None
    engines = importlib.util.module_from_spec(described)
    monkeypatch.setitem(sys.modules, "engines", engines)  # dataclasses look their module up
    described.loader.exec_module(engines)

    def run(words: list[object], **options: object) -> subprocess.CompletedProcess[str]:
        refused = "WARNING: old\nERROR: No matching distribution found\nnote: not a problem with pip"
        installs = str(words[0]).endswith("pip")
        return subprocess.CompletedProcess(words, pip if installs else tests, stderr=refused if installs else "")

    monkeypatch.setattr(engines, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(engines.venv, "create", lambda folder, with_pip: folder.mkdir())
    monkeypatch.setattr(engines.subprocess, "run", run)
    assert engines.main(["economize"]) == status
    assert said in capsys.readouterr().out
    with pytest.raises(SystemExit, match="'vlm', but expected one of ctranslate2, economize"):
        engines.main(["vlm"])
