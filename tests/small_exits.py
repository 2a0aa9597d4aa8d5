"""Early exits in small, for tests: a bundled T5 on a few items, and one that passes for somebody's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emad_ref.evidence.exits import tasks
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.host import Host
from emad_ref.evidence.study import BUDGETS, Study
from emad_ref.models.loading import Loaded, load
from tests.unit.tasks.test_datasets import write

TUNED = "emad-t5-tiny-tuned"
LAYERS, MINIMA = 10, (3, 8)  # of the bundled T5s
WORLD_TASKS = ("qa", "summary", "count")


@contextmanager
def few_items(name: str, items: int) -> Iterator[Evidence]:
    """Evidence of a bundled T5 on so many items of each task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.ITEMS, "smoke", items)
        made = Evidence(load(name), Study(), Host())
        for task in made.exits.tasks:
            made.exits.asked.items(task)
        yield made


def somebodys(loaded: Loaded, data: Path | None = None, *, budget: str = "smoke", **facts: Any) -> Evidence:
    """Evidence of a T5 that did not come with the package, unless ``bundled`` says so."""
    return Evidence(replace(loaded, **{"bundled": False, **facts}), Study(budget=BUDGETS[budget], data=data), Host())


def published(folder: Path, squad: Any, samsum: Any) -> Path:
    """A data folder with both files."""
    write(folder / "squad/dev-v1.1.json", squad)
    write(folder / "samsum/val.json", samsum)
    return folder
