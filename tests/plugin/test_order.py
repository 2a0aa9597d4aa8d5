"""In which order the suites run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emad_ref.report.shipped import SUITES
from pytest_emad.order import FOLDERS, ordered


def at(path: Path | str, name: str = "") -> Any:
    return SimpleNamespace(path=Path(path), name=name)


def ours(folder: str, name: str = "") -> Any:
    return at(SUITES[0] / folder / "test_any.py", name)


def test_what_takes_seconds_comes_first_and_each_folder_keeps_its_order() -> None:
    items = [ours("claims", "a"), ours("claims", "b"), ours("cost"), ours("fidelity"), ours("invariants")]
    found = ordered(items)
    assert [item.path.parent.name for item in found] == ["invariants", "fidelity", "claims", "claims", "cost"]
    assert [item.name for item in found if item.name] == ["a", "b"]


def test_other_peoples_tests_keep_their_places() -> None:
    theirs, more = at("/elsewhere/test_a.py"), at("/elsewhere/test_z.py")
    first, last = ours("claims"), ours("invariants")
    assert ordered([theirs, first, more, last]) == [theirs, last, more, first]


@pytest.mark.parametrize("root", [root for root in SUITES if root.is_dir()] or SUITES)
def test_every_folder_of_suites_has_its_place(root: Path) -> None:
    assert {path.name for path in root.iterdir() if any(path.glob("test_*.py"))} == set(FOLDERS)
