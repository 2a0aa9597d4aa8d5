"""SQuAD and SamSum as input → output pairs, from a data folder: what an encoder-decoder that reads English is asked.

    squad     question: QUESTION context: CONTEXT → an answer     dev-v1.1.json; SQuAD's test set was never published
    samsum    summarize: DIALOGUE → its summary                   val.json, as in the early-exit paper, else test.json

The form is T5's own (``text.pairs.read_as``). Files of a training split are not looked at: a tuned model has seen them.
A pair keeps the text that it is about: questions about one paragraph are not independent of one another.
Pairs come in an order that the seed fixes, for published files are sorted by article; of two draws with one seed the
smaller is the beginning of the larger. Layout and checks of the files stand in ``datasets``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emad_ref.errors import BadArgument
from emad_ref.tasks.datasets import SOURCES, Sample, file_of, read
from emad_ref.text.pairs import SourceTarget, read_as


@dataclass(frozen=True)
class Published:
    """``splits``: of ``datasets.SOURCES``, the first that a folder has is asked; ``text``: the field that is read.

    ``pair``: row → source, answers.
    """

    splits: tuple[str, ...]
    text: str
    pair: Callable[[Sample], tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Drawn:
    """``pairs`` of the ``of`` that ``file`` holds."""

    file: Path
    of: int
    pairs: tuple[SourceTarget, ...]


PUBLISHED: dict[str, Published] = {
    "squad": Published(
        ("validation",),
        "context",
        lambda row: (read_as("qa", row["context"], row["question"]), tuple(row["answers"]["text"])),
    ),
    "samsum": Published(
        ("validation", "test"), "dialogue", lambda row: (read_as("summary", row["dialogue"]), (row["summary"],))
    ),
}


def files_of(task: str) -> tuple[str, ...]:
    """Files of a data folder, any of which holds ``task``: the one to prefer first, other endings left out.

    Raises:
        BadArgument: unknown task.
    """
    return tuple(f"{task}/{SOURCES[task].files[split][0]}" for split in _published(task).splits)


def held(task: str, data: Path) -> bool:
    """Whether the data folder has a file of ``task``. Raises as ``files_of``."""
    return _split(task, data) is not None


def draw(task: str, data: Path, count: int | None, seed: int = 0) -> Drawn:
    """``count`` pairs of ``task``, or all where there are fewer, or for None; the first answer is the target.

    Raises:
        BadArgument: unknown task, a folder without a file of it, a row that does not fit.
    """
    split = _split(task, data)
    if split is None:
        raise BadArgument("data", str(data), f"a folder that holds {' or '.join(files_of(task))}", "put the file there")
    file = file_of(task, split, data / task)
    assert file is not None, "_split names a split whose file is there"
    rows = read(task, split, data / task)
    random.Random(f"{task}/{split}/{seed}").shuffle(rows)
    return Drawn(file, len(rows), tuple(_pair(task, row) for row in rows[:count]))


def _published(task: str) -> Published:
    if task not in PUBLISHED:
        raise BadArgument("task", task, f"one of {', '.join(PUBLISHED)}")
    return PUBLISHED[task]


def _split(task: str, data: Path) -> str | None:
    """The split whose file is there and is asked."""
    return next((split for split in _published(task).splits if file_of(task, split, data / task)), None)


def _pair(task: str, row: Sample) -> SourceTarget:
    source, answers = PUBLISHED[task].pair(row)
    return SourceTarget(task, source, answers[0], answers, row[PUBLISHED[task].text])
