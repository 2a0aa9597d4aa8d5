"""Reads scores from a table: ``.jsonl`` or ``.csv`` with the columns task, id and score.

``document`` (items with one value depend on each other), ``prompt``, ``target`` and ``answer`` may stand beside them;
other columns are named in a note. A higher score is better; true and false count as 1 and 0.
"""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from emad_ref.errors import is_number
from emad_ref.files import BadFile, parse_json, read_lines
from pytest_emad.accuracy.items import (
    Evaluation,
    ItemTexts,
    ScoreColumns,
    ScoredTask,
    require_distinct_ids,
    require_some_items,
)
from pytest_emad.measurements.option_values import parse_number

REQUIRED = ("task", "id", "score")
OPTIONAL = ("document", "prompt", "target", "answer")
SUFFIXES = (".jsonl", ".csv")
BOOLEANS = {"true": 1.0, "false": 0.0}
MEND = "mend the row"


def read_score_table(path: Path, argument: str, cluster: str = "") -> Evaluation:
    """The evaluation in a table.

    Args:
        argument: the name of the argument for messages.
        cluster: the column whose values group dependent items, instead of ``document``.

    Raises:
        BadFile: a missing column, a row that is damaged, a score that is no number from 0 to 1, an id twice.
    """
    rows = list(_iterate_csv(path, argument) if path.suffix == ".csv" else _iterate_jsonl(path, argument))
    require_some_items(argument, path, len(rows))
    known = {*REQUIRED, *OPTIONAL, cluster}
    foreign = dict.fromkeys(name for _, row in rows for name in row if name not in known)
    notes = [f"columns that nothing reads: {', '.join(foreign)}"] if foreign else []
    by_task: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, row in rows:
        _require_columns(row, (*REQUIRED, *([cluster] if cluster else [])), number, path, argument)
        row["score"] = _parse_score(row["score"], number, path, argument)
        by_task[str(row["task"])].append(row)
    tasks = [_read_task(task, them, path, argument, cluster or "document") for task, them in by_task.items()]
    return Evaluation(path, "table", path.stem, "", tasks, (), (), notes)


def _iterate_jsonl(path: Path, argument: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_lines(path, argument), start=1):
        if line.isspace():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            end = "" if line.endswith("\n") else "; the file ends inside it, so it is truncated"
            reason = f"line {number} is no JSON: {error}{end}"
            raise BadFile(argument, path, "one JSON object a line", reason, MEND) from error
        if not isinstance(row, dict):
            raise BadFile(argument, path, "one JSON object a line", f"line {number} is no object", MEND)
        yield number, row


def _iterate_csv(path: Path, argument: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(read_lines(path, argument), strict=True)
    try:
        names = reader.fieldnames or []
        if len(set(names)) < len(names):
            reason = f"its header is {', '.join(names)}"
            raise BadFile(argument, path, "each column once", reason, "name the columns task, id and score")
        for row in reader:
            if None in row or None in row.values():
                reason = f"line {reader.line_num} has another number of cells than the header"
                raise BadFile(argument, path, "as many cells in every line as in the header", reason, MEND)
            yield reader.line_num, dict(row)
    except csv.Error as error:
        reason = f"line {reader.line_num}: {error}"
        raise BadFile(argument, path, "a CSV file with a header", reason, MEND) from error


def _require_columns(row: dict[str, Any], names: Sequence[str], number: int, path: Path, argument: str) -> None:
    if missing := [name for name in names if row.get(name) in (None, "")]:
        reason = f"line {number} has no {missing[0]}, but {', '.join(row)}"
        remedy = "name the columns task, id and score"
        raise BadFile(argument, path, f"a {missing[0]} in every row", reason, remedy)


def _parse_score(value: Any, number: int, path: Path, argument: str) -> float:
    score = _to_number(value)
    if score is not None and 0 <= score <= 1:
        return float(score)
    remedy = "divide by the largest possible score" if score is not None and score > 1 else MEND
    raise BadFile(argument, path, "a score from 0 to 1 in every row", f"line {number} has {value!r}", remedy)


def _to_number(value: Any) -> float | None:
    """A number, or a text of one or of a boolean, as a number; None for anything else."""
    if isinstance(value, str):
        text = value.strip().lower()
        try:
            return BOOLEANS[text] if text in BOOLEANS else parse_number(text)
        except ValueError:
            return None
    return float(value) if isinstance(value, bool) or is_number(value) else None


def _read_task(task: str, rows: Sequence[dict[str, Any]], path: Path, argument: str, cluster: str) -> ScoredTask:
    columns = ScoreColumns(argument, path, task)
    for row in rows:
        columns.add_row([("score", row["score"])])
    ids = [str(row["id"]) for row in rows]
    require_distinct_ids(argument, path, task, ids)
    scores, _ = columns.finish(lambda metric: True)
    # an item without a document is one of its own
    clusters = [f"document {row[cluster]}" if row.get(cluster) not in (None, "") else f"id {row['id']}" for row in rows]
    prompts, targets = ([_hash(row.get(name)) for row in rows] for name in ("prompt", "target"))

    def read_texts(indices: Sequence[int]) -> list[ItemTexts]:
        texts = ([str(rows[index].get(name) or "") for name in ("prompt", "target", "answer")] for index in indices)
        return [ItemTexts(prompt, target, answer) for prompt, target, answer in texts]

    return ScoredTask(task, "", ids, [""] * len(ids), prompts, targets, clusters, scores, path, read_texts)


def _hash(text: Any) -> str:
    return "" if text in (None, "") else hashlib.sha256(str(text).encode()).hexdigest()
