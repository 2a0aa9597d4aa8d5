"""Fixtures of the plugin tests: a small project in a temporary folder that records hand-made verdicts, no model."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  # in-process runs restore sys.modules: it must be imported before the first
import pytest

import emad_ref
import pytest_emad.plugin  # noqa: F401  # the same
from emad_ref.models.bundled import weights_folder

INSTALLED = any(point.name == "emad" for point in entry_points(group="pytest11"))

VERDICTS = """
from pytest_emad.statistics.verdicts import Leg, Verdict

def verdict(outcome, claim="EMAD-F1", reason="", legs=(), good="lower"):
    found = (0.03, (0.02, 0.04), 200, 0.01, "relative rise")
    return Verdict(claim, "emad-tiny", outcome, *found, reason, legs, good)
"""

# for a folder that stands in for the suites: a passing shipped test must record something
RECORDED = """
import pytest
from pytest_emad.audit.finding import Finding

@pytest.fixture(autouse=True)
def recorded(emad_record): emad_record.record_audit(Finding("premise", True, "as seen", 1, 0))
"""

Run = Callable[..., pytest.RunResult]


def unwrapped(result: pytest.RunResult) -> pytest.LineMatcher:
    """Return the output with lines joined that the terminal's edge broke."""
    return pytest.LineMatcher(re.sub(r"\n +(?=\S)", " ", result.stdout.str()).split("\n"))


@pytest.fixture(scope="session", autouse=True)
def imported_for_good() -> None:
    """Import for good: in-process runs unload what they import, and parts of matplotlib and torch cannot load twice."""
    drawing = ("matplotlib.figure", "matplotlib.backends.backend_svg", "jinja2")
    for module in (*drawing, "hypothesis", "torch._dynamo", "torch.distributed.fsdp", "transformers.modeling_utils"):
        if find_spec(module.partition(".")[0]):
            importlib.import_module(module)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the outer run's CI and options from the inner runs, which load only xdist and our plugin.

    Looking for the plugins of all installed distributions takes half of pytest's start time.
    """
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin,pytest_emad.plugin")
    for name in (
        "CI",
        "PYTEST_ADDOPTS",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
        "GITHUB_STEP_SUMMARY",
        "EMAD_PRODUCT_TABLE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def installed_plugins(plain_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let inner runs load the plugins of all installed distributions, as a user's do."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    monkeypatch.delenv("PYTEST_PLUGINS")


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a pytester with our plugin loaded, installed or not, and ``verdict`` importable."""
    pytester.makepyfile(verdicts=VERDICTS)
    pytester.syspathinsert()
    if not INSTALLED:
        pytester.plugins.append("pytest_emad.plugin")
    return pytester


@pytest.fixture
def run(project: pytest.Pytester) -> Run:
    """Run pytest in this process."""

    def run(*arguments: object) -> pytest.RunResult:
        return project.runpytest_inprocess("-p", "no:cacheprovider", *map(str, arguments))

    return run


@pytest.fixture
def run_apart(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest in a subprocess, as xdist needs."""
    monkeypatch.setenv("PYTHONPATH", str(Path(emad_ref.__file__).parents[1]))

    def run(*arguments: object) -> pytest.RunResult:
        return project.runpytest_subprocess("-p", "no:cacheprovider", *map(str, arguments))

    return run


@pytest.fixture
def wheel_layout(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy both packages in a wheel's layout, first on the path of child processes; return its suites."""
    site = project.path.parent / f"{project.path.name}-site"
    for package in ("emad_ref", "pytest_emad"):
        source = Path(emad_ref.__file__).parents[1] / package
        ignored = shutil.ignore_patterns("weights", "suites", "golden")  # bytecode serves the copies, too
        shutil.copytree(source, site / package, ignore=ignored)
    (site / "emad_ref" / "models" / "weights").symlink_to(weights_folder())
    suites = site / "pytest_emad" / "suites"
    for folder in (suites, suites / "claims", suites / "cost"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (suites / "claims" / "test_claim.py").write_text(
        "from pytest_emad.audit.finding import Finding\ndef test_claim(emad_settings, emad_record):\n"
        "    emad_record.record_audit(Finding('seed', emad_settings.study.seed == 0, '', 1, 0))\n"
    )
    (suites / "cost" / "test_time.py").write_text(
        "from pytest_emad.audit.finding import Finding\ndef test_time(emad_record):\n"
        "    emad_record.record_audit(Finding('clock', True, '', 1, 0))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    return suites


def report_of(folder: Path) -> dict[str, Any]:
    """Return ``report.json`` of a run with ``--emad-report folder``."""
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))
