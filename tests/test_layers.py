"""The layer rule of docs/layout.md, checked by import-linter, whose contracts cover every package; and by text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.forked_python import run_forked

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
    """A tree like ours with only forbidden imports, one per contract: sources are read, not installed packages."""
    for package in ("emad_ref", "pytest_emad", "suites"):
        for source in (ROOT / package).rglob("*.py"):
            target = tmp_path / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
    planted = {
        "emad_ref/errors.py": "import emad_ref.record\nimport pytest_emad\n",
        "emad_ref/unheard_of.py": "",
        "pytest_emad/measurements/model_under_test.py": "import pytest_emad.measurements.model_measurements\n",
        "pytest_emad/audit/work.py": "def check() -> None:\n    import pytest_emad.audit.finding\n",
        "pytest_emad/audit/finding.py": "import typing\nif typing.TYPE_CHECKING:\n    import pytest_emad.audit.work\n",
        "pytest_emad/run/options.py": "import pytest_emad.run.fixtures\n",
        "suites/claims/test_pair.py": "import suites.claims.test_model\n",
    }
    for path, text in planted.items():
        (tmp_path / path).write_text(text)
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for said in (
        "emad_ref.errors is not allowed to import emad_ref.record",
        "emad_ref is not allowed to import pytest_emad",
        "No cycles are allowed in pytest_emad.audit.",
        "pytest_emad.measurements.model_under_test is not allowed to import pytest_emad.measurements.model_",
        "pytest_emad.run.options is not allowed to import pytest_emad.run.fixtures",
        "suites.claims.test_pair is not allowed to import suites.claims.test_model",
    ):
        assert said in " ".join(done.stdout.split())  # long lines are wrapped
    assert "unheard_of" in done.stdout


def test_the_reference_does_not_name_the_judge() -> None:
    """No string, docstring or data file of ``emad_ref`` contains the judge's import name, also as part of its hook's.

    ``pytest_emad_models`` is the package of the bundled weights. Distributions (in pip commands) have a hyphen.
    """
    named = [
        f"{file.relative_to(ROOT)}: {line.decode(errors='replace').strip()[:200]}"
        for file in sorted((ROOT / "emad_ref").rglob("*"))
        if file.is_file() and file.suffix != ".pyc"
        for line in file.read_bytes().split(b"\n")
        if re.search(rb"pytest_emad(?!_models)", line)
    ]
    assert not named, "\n".join(named)


OPTIONAL = ("lm_eval", "datasets", "distributed")


def test_measurements_need_no_extra(tmp_path: Path) -> None:
    """README's first command installs neither lm-eval nor Dask."""
    (tmp_path / "program.py").write_text(
        f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))\n"
        "import pytest_emad.measurements.model_measurements, pytest_emad.measurements.pair_measurements\n"
        "import pytest_emad.screening.screen, pytest_emad.cli"
    )
    done = run_forked(["program"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_help_needs_no_torch(tmp_path: Path) -> None:
    """Torch takes seconds to import: no module of the command line, of the run plan or of the plugin imports it."""
    modules = [f"pytest_emad.cli.{source.stem}" for source in (ROOT / "pytest_emad" / "cli").glob("[!_]*.py")]
    modules += ["pytest_emad.claims.base", "pytest_emad.plugin"]
    (tmp_path / "program.py").write_text(f"import sys; sys.modules['torch'] = None\nimport {', '.join(modules)}")
    done = run_forked(["program"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
