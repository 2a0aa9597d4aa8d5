"""The layer rule of DESIGN, held by import-linter; and that the contracts speak of every package there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", program, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_every_import_points_the_right_way() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_import_is_seen(tmp_path: Path) -> None:
    """A tree with one import against each contract: the linter reads the sources, not what is installed."""
    for name in ("emad_ref", "emad_ref/replay", "emad_ref/text", "pytest_emad", "suites", "suites/a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    for name in ("protocol", "point", "signals", "record", "errors", "unheard_of"):
        (tmp_path / "emad_ref" / f"{name}.py").touch()
    (tmp_path / "emad_ref" / "errors.py").write_text("import emad_ref.record\nimport pytest_emad\n")
    (tmp_path / "suites" / "a" / "test_one.py").touch()
    (tmp_path / "suites" / "a" / "test_two.py").write_text("import suites.a.test_one\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for said in (
        "emad_ref.errors is not allowed to import emad_ref.record",
        "emad_ref is not allowed to import pytest_emad",
        "suites.a.test_two is not allowed to import suites.a.test_one",
    ):
        assert said in done.stdout
    assert "unheard_of" in done.stdout
