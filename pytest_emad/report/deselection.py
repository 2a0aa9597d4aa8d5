"""Shipped tests, and sentences about the ones that a run skipped.

A shipped test is named by file and function, without parameters. Its file is parsed, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import emad_ref
from pytest_emad.statistics.gate import format_claim_names
from pytest_emad.statistics.verdicts import load_register

ABOVE_BUDGET = "above the budget"
NO_PAIR = "no pair was named"
NO_EXIT = "no exit was brought"  # not printed: most runs have no exit
LEFT_OUT = "left out by --emad-only"
NOT_OF_TIER = "not of the tier that --emad-tier names"  # not printed, since the user requested the tier

REASON_TEXTS = {
    LEFT_OUT: LEFT_OUT,
    NO_PAIR: "no pair was named; name one by --emad-pair SMALL,LARGE",
    ABOVE_BUDGET: "slow and not gating; --emad-all-claims or a larger --emad-budget adds them",
}


def describe_deselections(deselected: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each reason to skip tests, with their claims. The arguments are parts of ``report.json``.

    A slow test that ``--emad-only`` also excludes counts there, since a larger budget would not run it.
    """
    entries = list(deselected)
    whys = [_printed_reason(entry, settings) for entry in entries]
    for why, words in REASON_TEXTS.items():
        left = [entry for entry, reason in zip(entries, whys, strict=True) if reason == why]
        claims = list(dict.fromkeys(entry["claim"] for entry in left if entry["claim"]))
        others = sum(not entry["claim"] for entry in left)
        parts = [format_claim_names(claims, load_register())] if claims else []
        other = "other " if claims else ""
        parts += [f"{others} {other}test{'s' if others > 1 else ''}"] if others else []
        if parts:
            yield f"skipped {' and '.join(parts)}: {words}"


def _printed_reason(entry: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The reason of ``deselected`` that excludes ``entry`` at any budget, if there is one."""
    why, only, claim = str(entry["why"]), settings["only"], entry["claim"]
    is_left_out = why == ABOVE_BUDGET and only and claim not in only and (claim or entry["shipped"])
    return LEFT_OUT if is_left_out else why


HOME = Path(emad_ref.__file__).resolve().parents[1]
SUITES = (HOME / "suites", HOME / "pytest_emad" / "suites")  # checkout, wheel
PAGES = (
    HOME / "pytest_emad" / "docs",
    HOME / "docs",
)  # wheel, checkout (next to a wheel, `docs` may be foreign)
PREFIX = "suites"


def path_below_suites(path: Path, suites: Iterable[Path] = SUITES) -> str | None:
    """``suites/…`` for a file or folder of this package, None for any other."""
    for folder in suites:
        if path.is_relative_to(folder):
            return "/".join((PREFIX, *path.relative_to(folder).parts))
    return None


def list_shipped_tests(suites: Iterable[Path] = SUITES) -> list[str]:
    """Names of all test functions below the first of ``suites`` that exists, in order."""
    folder = next((folder for folder in suites if folder.is_dir()), None)
    if folder is None:
        return []
    files = sorted(folder.rglob("test_*.py"))
    return [
        f"{path_below_suites(file, [folder])}::{function}"
        for file in files
        for function in _test_functions(file.read_text(encoding="utf-8"))
    ]


def suite_folder_names(suites: Iterable[Path] = SUITES) -> list[str]:
    """Folders of shipped tests: ``invariants``, ``fidelity``, …"""
    return list(dict.fromkeys(name.split("/")[1] for name in list_shipped_tests(suites)))


def is_in_selection(name: str, selection: Iterable[str]) -> bool:
    """Whether the shipped test ``name`` is in ``selection``, a list of functions, files and folders."""
    return any(name == one or name.startswith((f"{one}/", f"{one}::")) for one in selection)


@cache  # used several times by every run
def _test_functions(source: str) -> list[str]:
    tree = ast.parse(source)
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
