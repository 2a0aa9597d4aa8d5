"""The tests that this version ships, read from the source of its suites: what a run of them must not lose.

A shipped test is named by file and function, ``suites/fidelity/test_bridge.py::test_sampling_is…``, wherever the suites
are installed and however it was asked for. Which models, claims and seeds a function is asked for is known only to a
run: parameters are no part of the name. Nothing is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import emad_ref

HOME = Path(emad_ref.__file__).resolve().parents[1]
SUITES = (HOME / "suites", HOME / "pytest_emad" / "suites")  # checkout, wheel
PREFIX = "suites"


def shipped_name(path: Path, suites: Iterable[Path] = SUITES) -> str | None:
    """``suites/…`` for a file or folder of ours, None for any other."""
    for folder in suites:
        if path.is_relative_to(folder):
            return "/".join((PREFIX, *path.relative_to(folder).parts))
    return None


def shipped_tests(suites: Iterable[Path] = SUITES) -> list[str]:
    """Every test function below the first of ``suites`` that exists, by name and in order."""
    folder = next((folder for folder in suites if folder.is_dir()), None)
    if folder is None:
        return []
    files = sorted(folder.rglob("test_*.py"))
    return [f"{shipped_name(file, [folder])}::{function}" for file in files for function in _functions(file)]


def suite_names(suites: Iterable[Path] = SUITES) -> list[str]:
    """``invariants``, ``fidelity`` and so on: the folders of shipped tests."""
    return list(dict.fromkeys(name.split("/")[1] for name in shipped_tests(suites)))


def below(name: str, asked: Iterable[str]) -> bool:
    """Whether the shipped test ``name`` is, or lies in, a function, file or folder of ``asked``."""
    return any(name == one or name.startswith((f"{one}/", f"{one}::")) for one in asked)


def _functions(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
