"""A missing extra is one error with the command that installs it, wherever it is missed."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from emad_ref.errors import EXTRA_OF_PACKAGE, MissingExtra, require_extra
from pytest_emad.measurements.study import Study

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("package", EXTRA_OF_PACKAGE)
def test_each_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = rf"^what I do needs {package}, not installed here; "
    said += rf"pip install 'pytest-emad\[{EXTRA_OF_PACKAGE[package]}\]', or rest$"
    with pytest.raises(MissingExtra, match=said):
        require_extra("what I do", package, alternative="rest")


@pytest.mark.skipif(not PROJECT.is_file(), reason="an installed package has no pyproject.toml")
@pytest.mark.parametrize("package", EXTRA_OF_PACKAGE)
def test_the_extra_brings_the_package(package: str) -> None:
    if package not in packages_distributions():
        pytest.skip(f"{package} is not installed")
    extras = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    brought = [requirement.split(">=")[0] for requirement in extras[EXTRA_OF_PACKAGE[package]]]
    assert set(brought) & set(map(canonicalize_name, packages_distributions()[package]))


def test_a_run_with_tasks_needs_lm_eval_before_it_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    Study().require_extras()
    with pytest.raises(MissingExtra, match=r"--emad-tasks='gsm8k,wikitext' needs lm_eval.*or leave the option out"):
        Study(tasks=frozenset({"wikitext", "gsm8k"})).require_extras()
