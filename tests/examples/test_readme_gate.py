"""README's gate command passes correct decoders of every kind and fails wrong ones (slow: minutes each)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
JUDGE, VERIFY = (next(line for line in README.splitlines() if line.startswith(start))
                 for start in ("pytest --pyargs pytest_emad.suites --emad-gate", "emad verify report/"))  # fmt: skip
OF_README = re.search(r"<!-- file: conftest.py -->\n```python\n(.*?)```", README, re.DOTALL)[1]
WRONG = """
from tests.mutants.catalogue import CATALOGUE


def pytest_emad_make_decoder(config, request):
    return CATALOGUE[{name!r}].make(request)
"""


def gated(folder: Path, conftest: str, *options: str) -> tuple[int, int, str]:
    """Return (status of the run, status of ``emad verify``, output of both)."""
    (folder / "conftest.py").write_text(conftest)
    words = [*JUDGE.split()[1:], "--emad-model", "emad-nano", "-p", "no:cacheprovider", *options]
    run = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=folder, capture_output=True, text=True)
    verify = [sys.executable, "-m", "pytest_emad", *VERIFY.split()[1:]]
    check = subprocess.run(verify, cwd=folder, capture_output=True, text=True)
    return run.returncode, check.returncode, run.stdout + check.stdout + check.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["README", "transformers", "C++"])
def test_right_decoders_are_green(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    conftest = {"README": OF_README, "transformers": (EXAMPLES / "plugin" / "plain_decoder.py").read_text(), "C++": ""}
    options = ["--emad-decoder", request.getfixturevalue("place")] if kind == "C++" else []
    status, verified, said = gated(tmp_path, conftest[kind], *options)
    assert (status, verified) == (0, 0), said[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["refuses-everything", "refuses-sessions", "generation-short"])
def test_wrong_decoders_are_red(name: str, tmp_path: Path) -> None:
    status, verified, said = gated(tmp_path, WRONG.format(name=name))
    assert (status, verified) == (1, 1), said[-3000:]


def test_a_wheel_has_the_suites_inside_and_an_editable_install_finds_them_beside(tmp_path: Path) -> None:
    code = "from importlib.util import find_spec; print(find_spec('pytest_emad.suites').origin)"
    beside = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(beside.stdout.strip()) == ROOT / "suites" / "__init__.py"
    for package in ("pytest_emad", "emad_ref"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "weights"))
    shutil.copytree(ROOT / "suites", tmp_path / "pytest_emad" / "suites")
    inside = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(inside.stdout.strip()) == tmp_path / "pytest_emad" / "suites" / "__init__.py"
