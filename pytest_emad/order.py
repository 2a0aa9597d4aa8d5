"""In which order our suites run: whoever waits for a verdict sees one soon, and is told first of what matters most.

Correctness comes before quality, quality before time: a decoder whose K/V cache is wrong need not be timed to be sent
back. Of each model, the tests that gate and take no time come before all others. Tests that are not ours keep their
places among ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from pytest_emad.choosing import marker
from pytest_emad.installed import is_ours, shipped_file

FOLDERS = ("invariants", "fidelity", "claims", "cost", "ablations")


def by_folder(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """``items``, ours by the folder of ``suites`` they stand in and within one as they were collected."""
    ours = {place: file for place, item in enumerate(items) if (file := shipped_file(item.path)) is not None}
    moved = iter(sorted(ours, key=lambda place: rank(ours[place].split("/")[1])))
    return [items[next(moved)] if place in ours else item for place, item in enumerate(items)]


def rank(folder: str) -> int:
    """When the tests of a folder of ``suites`` run, before or after those of others."""
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def gates_first(items: Sequence[pytest.Item], gating: Collection[str], exact: Collection[str]) -> list[pytest.Item]:
    """``items``, first those of ``gating`` claims without a model, then of each model the gates, the ``exact`` first.

    What measures time keeps its place: it is asked when nothing else is left to do. Models stay in their order, so that
    one is freed before the next is loaded.
    """
    parts: list[list[pytest.Item]] = []
    model = None
    for item in items:
        asked = _model_of(item)
        if not parts or (asked is not None and model is not None and asked != model):
            parts.append([])
        model = asked or model
        parts[-1].append(item)

    def when(item: pytest.Item) -> int:
        asked = marker(item)
        if asked["claim"] not in gating or asked["measures"] or not is_ours(item):
            return 3
        return 0 if _model_of(item) is None else 1 if asked["claim"] in exact else 2

    first = [item for item in items if when(item) == 0]
    return [*first, *(item for part in parts for item in sorted(part, key=when) if when(item) > 0)]


def _model_of(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("emad_model")
