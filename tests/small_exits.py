"""Early exits for tests: a bundled T5 on a few items, and a T5 that looks like a user's own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emad_ref.models.loading import LoadedModel, load
from pytest_emad.measurements import early_exit_tasks
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from tests.unit.tasks.test_datasets import write

TUNED = "emad-t5-tiny-tuned"
LAYERS, MINIMA = 10, (3, 8)  # of the bundled T5s
WORLD_TASKS = ("qa", "summary", "count")


def few_items(name: str, items: int) -> ModelMeasurements:
    """Return measurements of a bundled T5 on this many items of each task."""
    made = ModelMeasurements(load(name), Study(), RunResources())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(early_exit_tasks.ITEMS, "smoke", items)
        for task in made.early_exits.task_names:
            made.early_exits.task_items.load_items(task)
    return made


def somebodys(
    loaded: LoadedModel, data: Path | None = None, *, budget: str = "smoke", **facts: Any
) -> ModelMeasurements:
    """Return measurements of a T5 that counts as a user's own, unless ``bundled``."""
    return ModelMeasurements(
        replace(loaded, **{"bundled": False, **facts}), Study(budget=BUDGETS[budget], data=data), RunResources()
    )


def published(folder: Path, squad: Any, samsum: Any) -> Path:
    """Write a data folder with both files."""
    write(folder / "squad/validation.jsonl", squad)
    write(folder / "samsum/validation.jsonl", samsum)
    return folder
