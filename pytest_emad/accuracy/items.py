"""Scored items of one evaluation, as every reader returns them.

An evaluation has tasks, a task has items, and an item has one score per metric. lm-eval scores a task once per filter,
so a ``ScoredTask`` is one task under one filter. Texts of items (prompt, answers) stay in their files until someone
asks for some of them: only items whose score differs are shown.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from emad_ref.absent import Absent
from emad_ref.errors import is_number
from emad_ref.files import BadFile
from emad_ref.record import Floats

NOT_A_NUMBER = "no number per item"
BEYOND_SHARES = "scores outside 0–1, on which a margin in points has no meaning"


@dataclass(frozen=True)
class ItemTexts:
    """Texts of one item for a reader.

    ``answer``  the scored answer; ``response``: the whole output if it differs, else "".
    ``lead``    nats by which the target's log-likelihood leads the best other choice; None without choices.
    """

    prompt: str
    target: str
    answer: str
    response: str = ""
    lead: float | None = None


@dataclass(frozen=True)
class ScoredTask:
    """One task under one filter; the columns have one entry per item, in one order.

    ``ids``        names of the items, all different.
    ``documents``  hash of each document; ``prompts``, ``targets``: hashes of prompt and target. "" if unknown.
    ``clusters``   items with the same text here depend on each other.
    ``scores``     metric → float64 [items]; larger is better; NaN where the item has no such metric.
    ``source``     the file or folder that messages name.
    ``read_texts`` indices of items → their texts.
    """

    task: str
    filter: str
    ids: Sequence[str]
    documents: Sequence[str]
    prompts: Sequence[str]
    targets: Sequence[str]
    clusters: Sequence[str]
    scores: Mapping[str, Floats]
    source: Path
    read_texts: Callable[[Sequence[int]], list[ItemTexts]]


@dataclass(frozen=True)
class TaskGroup:
    """A group of tasks that is one test.

    ``by_size``: its score is the mean over items; False: that of its tasks' scores; None: both means are equal here.
    """

    name: str
    metric: str
    filter: str
    members: Sequence[str]
    by_size: bool | None


@dataclass(frozen=True)
class Omission:
    """``count`` items, rows or scores of ``subject`` that no verdict uses, and the reason."""

    subject: str
    count: int
    reason: str


@dataclass(frozen=True)
class Evaluation:
    """One finished evaluation.

    ``form``   how it was read: lm-eval, inspect_ai or table. ``model``: its name in the files, or "".
    ``run``    the id or date of the run, or "": two sides with one are one run.
    ``notes``  sentences for readers: which file was taken, what was assumed.
    """

    path: Path
    form: str
    model: str
    run: str
    tasks: Sequence[ScoredTask]
    groups: Sequence[TaskGroup] = ()
    omissions: Sequence[Omission] = ()
    notes: Sequence[str] = field(default=())


Dated = TypeVar("Dated")


def choose_latest_by_task(
    found: Iterable[tuple[str, Dated]],
    date_of: Callable[[Dated], str],
    path_of: Callable[[Dated], Path],
    kind: str,
    counted: str,
) -> tuple[dict[str, Dated], list[Omission], list[str]]:
    """Of several sources of one task the latest, with the earlier ones as left out and a note on each choice.

    Args:
        found: (task, source).
        kind: what a source is called, "file" or "log"; ``counted``: what a note counts, "dates" or "logs".
    """
    by_task: defaultdict[str, list[Dated]] = defaultdict(list)
    for task, source in found:
        by_task[task].append(source)
    latest = {task: max(sources, key=date_of) for task, sources in by_task.items()}
    omissions = [
        Omission(path_of(source).name, 1, f"a {kind} of an earlier date")
        for task, sources in by_task.items()
        for source in sources
        if source is not latest[task]
    ]
    notes = [
        f"{task}: took {path_of(latest[task]).name}, the latest of {len(sources)} {counted}"
        for task, sources in by_task.items()
        if len(sources) > 1
    ]
    return latest, omissions, notes


class ScoreColumns:
    """Scores by metric while rows are read; ``finish`` checks them and gives columns."""

    def __init__(self, argument: str, source: Path, subject: str):
        self._argument, self._source, self._subject = argument, source, subject
        self._values: dict[str, dict[int, Any]] = {}
        self._rows = 0

    def add_row(self, values: Iterable[tuple[str, Any]]) -> None:
        """Add the scores of the next item."""
        for metric, value in values:
            self._values.setdefault(metric, {})[self._rows] = value
        self._rows += 1

    def finish(self, is_higher_better: Callable[[str], bool]) -> tuple[dict[str, Floats], list[Omission]]:
        """Columns [items] by metric, larger is better, and the metrics that are no share per item.

        Raises:
            BadFile: no metric at all, or a score that is NaN, infinite or null.
        """
        columns: dict[str, Floats] = {}
        omissions = []
        for metric, values in self._values.items():
            column = self._column(metric, values)
            if isinstance(column, Absent):
                omissions.append(Omission(f"{self._subject}: {metric}", len(values), column.reason))
                continue
            columns[metric] = column if is_higher_better(metric) else 1.0 - column
        if not columns:
            named = "; ".join(f"{each.subject.rpartition(': ')[2]} has {each.reason}" for each in omissions)
            reason = f"{self._subject}: {named or 'no row has a metric'}"
            remedy = "evaluate with a metric that scores each item"
            raise BadFile(self._argument, self._source, "a metric with one number per item", reason, remedy)
        return columns, omissions

    def _column(self, metric: str, values: Mapping[int, Any]) -> Floats | Absent:
        wrong = [
            row for row, value in values.items() if value is None or (is_number(value) and not math.isfinite(value))
        ]
        if wrong:
            value = values[wrong[0]]
            shown = "null" if value is None else str(value)
            reason = f"{self._subject}: {metric} is {shown} for item {wrong[0] + 1} and {len(wrong) - 1} others"
            remedy = "evaluate these items again; a missing score is neither right nor wrong"
            raise BadFile(self._argument, self._source, "a finite score for every item", reason, remedy)
        if not all(isinstance(value, bool) or is_number(value) for value in values.values()):
            return Absent(NOT_A_NUMBER)
        column = np.full(self._rows, np.nan)
        column[list(values)] = [float(value) for value in values.values()]
        given = column[list(values)]
        if given.min() < 0 or given.max() > 1:
            return Absent(BEYOND_SHARES)
        return column


def require_distinct_ids(argument: str, source: Path, subject: str, ids: Sequence[str]) -> None:
    """Raise BadFile if two items of one task have one id."""
    if len(set(ids)) < len(ids):
        repeated = [name for name, count in Counter(ids).items() if count > 1]
        reason = (
            f"{subject}: id {repeated[0]!r} stands {ids.count(repeated[0])} times, as do {len(repeated) - 1} others"
        )
        remedy = "keep one row for each item; two runs may have been written to one file"
        raise BadFile(argument, source, "each item once", reason, remedy)


def require_some_items(argument: str, source: Path, count: int) -> None:
    """Raise BadFile for a file without items."""
    if not count:
        raise BadFile(argument, source, "at least one scored item", "it has none", "evaluate again")
