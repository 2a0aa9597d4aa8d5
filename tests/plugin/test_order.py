"""In which order the suites run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emad_ref.report.deselection import SUITES
from pytest_emad.selection import FOLDERS, sort_by_folder, sort_gates_first


def at(path: Path | str, name: str = "", model: str | None = None, **marked: Any) -> Any:
    """As much of a test as ordering looks at."""
    mark = SimpleNamespace(kwargs=marked) if marked else None
    return SimpleNamespace(
        path=Path(path),
        name=name,
        get_closest_marker=lambda wanted: mark,
        callspec=SimpleNamespace(params={"emad_model": model} if model else {}),
    )


def ours(folder: str, name: str = "", model: str | None = None, **marked: Any) -> Any:
    return at(SUITES[0] / folder / "test_any.py", name, model, **marked)


def test_what_takes_seconds_comes_first_and_each_folder_keeps_its_order() -> None:
    items = [ours("claims", "a"), ours("claims", "b"), ours("cost"), ours("fidelity"), ours("invariants")]
    found = sort_by_folder(items)
    assert [item.path.parent.name for item in found] == ["invariants", "fidelity", "claims", "claims", "cost"]
    assert [item.name for item in found if item.name] == ["a", "b"]


def test_other_peoples_tests_keep_their_places() -> None:
    theirs, more = at("/elsewhere/test_a.py"), at("/elsewhere/test_z.py")
    first, last = ours("claims"), ours("invariants")
    assert sort_by_folder([theirs, first, more, last]) == [theirs, last, more, first]


@pytest.mark.parametrize("root", [root for root in SUITES if root.is_dir()] or SUITES)
def test_every_folder_of_suites_has_its_place(root: Path) -> None:
    assert {path.name for path in root.iterdir() if any(path.glob("test_*.py"))} == set(FOLDERS)


def test_gates_come_first_of_each_model_and_what_measures_stays() -> None:
    asked = [
        ours("claims", "a", model="one", claim="X-1"),
        ours("claims", "b", model="one", claim="X-F1"),
        ours("claims", "c", model="one", claim="X-E2"),
        ours("cost", "d", model="one", claim="X-F2", measures=True),
        ours("claims", "e", model="two", claim="X-1"),
        ours("claims", "f", model="two", claim="X-F1"),
        ours("claims", "g", claim="X-H1"),
        at("/elsewhere/test_z.py", "h", claim="X-F1"),
    ]
    found = sort_gates_first(asked, gating={"X-F1", "X-E2", "X-F2", "X-H1"}, exact={"X-E2", "X-H1"})
    assert "".join(item.name for item in found) == "gcbadfeh"
