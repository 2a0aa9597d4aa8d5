"""Fixtures of the examples: the C++ decoder (built if a compiler is found), a connection to it, and suite runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import emad_ref
from pytest_emad.remote.address import parse_address
from pytest_emad.remote.client import DecoderClient
from tests.forked_python import run_forked

ROOT = Path(emad_ref.__file__).parents[1]
EXAMPLES = ROOT / "examples"
CALL_S = 60.0

Suites = Callable[..., str]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build examples/cpp as its README describes, without a warning."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler: neither c++ nor g++ nor clang++ is on the PATH")
    built = tmp_path_factory.mktemp("cpp") / "decoder"
    strict = ["-Wall", "-Wextra", "-Werror"]
    command = [compiler, "-std=c++17", "-O2", *strict, "-o", built, EXAMPLES / "cpp" / "decoder.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="session")
def place(program: Path) -> str:
    """Return the value of --emad-decoder."""
    return f"exec:{shlex.quote(str(program))}"


@pytest.fixture
def remote(place: str, tmp_path: Path) -> Iterator[DecoderClient]:
    connected = DecoderClient(parse_address(place, tmp_path, "decoder"), CALL_S)
    yield connected
    connected.close()


@pytest.fixture
def suites(tmp_path: Path) -> Suites:
    """``suites("invariants", "--emad-decoder", "…")`` returns the output of a passing run, or the failure's cause."""

    def run(*arguments: object, path: Path = ROOT) -> str:
        dropped = ("CI", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        environment["PYTHONPATH"] = os.pathsep.join((str(path), str(ROOT)))
        paths = [
            ROOT / "suites" / part if str(part).startswith(("invariants", "fidelity")) else part for part in arguments
        ]
        words = ["pytest", "-rs", "-p", "no:cacheprovider", f"-c{ROOT / 'pyproject.toml'}", *paths]
        done = run_forked(words, cwd=tmp_path, env=environment)
        assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
        return done.stdout

    return run
