"""In which order our suites run: what takes seconds first, so that whoever waits sees a verdict soon.

Correctness comes before quality, quality before time: a decoder whose K/V cache is wrong need not be timed to be sent
back. Tests that are not ours keep their places.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_emad.selfcheck import shipped_file

FOLDERS = ("invariants", "fidelity", "claims", "cost", "ablations")


def ordered(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """``items``, ours by the folder of ``suites`` they stand in and within one as they were collected."""
    ours = {place: file for place, item in enumerate(items) if (file := shipped_file(item.path)) is not None}
    moved = iter(sorted(ours, key=lambda place: _rank(ours[place])))
    return [items[next(moved)] if place in ours else item for place, item in enumerate(items)]


def _rank(file: str) -> int:
    folder = file.split("/")[1]
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
