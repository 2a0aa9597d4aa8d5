"""Doctest examples run and show their results."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import emad_ref
import pytest_emad

HOMES = tuple(Path(house.__file__).parent for house in (emad_ref, pytest_emad))
MODULES = sorted(
    ".".join(path.relative_to(home.parent).with_suffix("").parts)
    for home in HOMES
    for path in home.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_there_are_examples() -> None:
    assert len(MODULES) >= 8


@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_they_give(name: str) -> None:
    done = doctest.testmod(import_module(name))
    assert done.attempted
    assert not done.failed
