"""Lazy exports of the package: importing it loads no heavy module."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

import emad_ref
import pytest_emad

HOUSES = (emad_ref, pytest_emad)
EXPORTS = [(house, name) for house in HOUSES for name in house.__all__]


@pytest.mark.parametrize(("house", "name"), EXPORTS)
def test_every_name_on_offer_resolves(house, name):
    assert getattr(house, name) is not None
    assert name in dir(house)


@pytest.mark.parametrize("house", HOUSES)
def test_a_name_not_on_offer_is_an_attribute_error(house):
    with pytest.raises(AttributeError, match="has no attribute 'teleport'"):
        _ = house.teleport


@pytest.mark.parametrize(
    "module",
    ["emad_ref", "pytest_emad", "pytest_emad.cli", "emad_ref.protocol", "emad_ref.point", "emad_ref.signals"],
)
def test_importing_the_light_modules_loads_nothing_heavy(module):
    heavy = ("torch", "transformers", "hypothesis", "sklearn", "scipy")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_help_of_the_command_loads_neither_numpy_nor_what_makes_completions():
    """Both, and reading package versions, took as long as the rest of ``emad --help``."""
    lazy = ("numpy", "shtab", "importlib.metadata", "asyncio", "huggingface_hub")
    code = (
        "import sys\nfrom pytest_emad.cli import main\n"
        f"try:\n main(['--help'])\nfinally:\n print([name for name in {lazy} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


DOCUMENTED = [(house, name) for house, name in EXPORTS if name != "__version__"]


def section(documentation: str, *titles: str) -> str:
    """Return the text under the first existing one of NumPy's section headings; empty if there is none."""
    for title in titles:
        if found := re.search(rf"^{title}\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", documentation, flags=re.MULTILINE | re.DOTALL):
            return found[1]
    return ""


@pytest.mark.parametrize(("house", "name"), DOCUMENTED)
def test_every_exported_name_documents_what_it_takes_and_returns(house, name):
    exported = getattr(house, name)
    documentation = inspect.getdoc(exported) or ""
    assert documentation.splitlines()[0].strip(), "no first line"
    if inspect.isclass(exported):
        taken = [each.name for each in fields(exported)] if is_dataclass(exported) else []
        described = section(documentation, "Parameters") + section(documentation, "Attributes")
    else:
        taken = list(inspect.signature(exported).parameters)
        described = section(documentation, "Parameters")
        assert section(documentation, "Returns", "Yields"), "no section Returns or Yields"
    headings = re.findall(r"^(\S.*)$", described, flags=re.MULTILINE)
    listed = {each.strip(" *") for heading in headings for each in heading.split(" : ")[0].split(",")}
    assert [each for each in taken if each not in listed and not each.startswith("_")] == []
