"""Rows of published tasks: a local data folder in the hub's place, in the hub's own schema.

    rows = read("gsm8k", "test", folder=data / "gsm8k")        # [{"question": …, "answer": …}, …]
    splits(source="gsm8k", folder="gsm8k", hub="openai/gsm8k", name="main", data=…)["test"]   # for lm-eval's tasks

Layout of a data folder (``.jsonl`` may be ``.jsonl.gz``; a split that is not asked for need not be there):

    wikitext-2/ wikitext-103/    valid.txt test.txt                 pages, cut at top-level headings
    pile/                        valid.jsonl                        text
    arc/ARC-Easy/ ARC-Challenge/ train.jsonl validation.jsonl test.jsonl   question, choices {text, label}, answerKey
    gsm8k/                       train.jsonl test.jsonl             question, answer
    math/SUBJECT/                train.jsonl test.jsonl             problem, solution
    humaneval/                   HumanEval.jsonl                    task_id, prompt, test, entry_point, …
    squad/                       train-v1.1.json dev-v1.1.json      SQuAD v1.1 as published
    samsum/                      train.json val.json test.json      dialogue, summary

Every row is checked before any model sees it; what is wrong is named by file, line and field. Hub rows pass the same
checks. This module knows nothing of models, prompts or scores.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument, EmadError
from emad_ref.text import world
from emad_ref.text.hub import offline, reachable
from emad_ref.text.sources import file_documents

Row = dict[str, Any]
Placed = tuple[str, Row]  # where a row stands, for messages, and the row

log = logging.getLogger(__name__)


class TaskDataUnavailable(EmadError):
    """Task data that is neither in a data folder nor to be had from the hub."""


@dataclass(frozen=True)
class Field:
    """``name`` must be in a row and ``fits`` its value; ``expected`` says so in words."""

    name: str
    fits: Callable[[Any, Row], bool]
    expected: str


@dataclass(frozen=True)
class Source:
    """``files``: names of each split's file, the first that exists is read; ``read`` yields its rows."""

    files: dict[str, tuple[str, ...]]
    read: Callable[[Path], Iterator[Placed]]
    fields: tuple[Field, ...]


# ---------------------------------------------------------------- reading


def read(source: str, split: str, folder: Path) -> list[Row]:
    """All rows of ``split`` (train, validation or test) of a folder, checked.

    Raises:
        BadArgument: an unknown source or split, a missing file, or a row that does not fit.
    """
    known = _source(source)
    path = file_of(source, split, folder)
    if path is None:
        names = known.files.get(split)
        if names is None:
            raise BadArgument("split", split, f"one of {', '.join(known.files)}, which {source} has")
        raise BadArgument("data", str(folder), f"a folder that holds {' or '.join(names)}", "put the file there")
    return checked(known.read(path), known.fields, f"file {str(path)!r} has no rows")


def file_of(source: str, split: str, folder: Path) -> Path | None:
    """The file that holds ``split``, or None."""
    candidates = (folder / name for name in _source(source).files.get(split, ()))
    return next((path for path in candidates if path.is_file()), None)


def checked(rows: Iterable[Placed], fields: Iterable[Field], empty: str) -> list[Row]:
    """The rows, each of which has every field with a fitting value; none at all is an error too."""
    good = []
    for place, row in rows:
        for field in fields:
            value = row.get(field.name)
            if field.name not in row or not field.fits(value, row):
                shown = value if len(repr(value)) <= 80 else repr(value)[:80] + "…"
                raise BadArgument(f"{place}: {field.name}", shown, field.expected, "mend the row or fetch it again")
        good.append(row)
    if not good:
        raise BadArgument("data", empty, "at least one", "fetch it again")
    return good


def json_lines(path: Path) -> Iterator[Placed]:
    """Objects, one per line; blank lines are passed over."""
    for number, line in enumerate(_text(path).split("\n"), start=1):  # splitlines() would cut at U+2028 in strings
        if line.strip():
            yield _object(line, f"{path}, line {number}")


def json_rows(path: Path) -> Iterator[Placed]:
    """One JSON array of objects, or objects one per line, by the file's first character."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        yield from json_lines(path)
        return
    for number, row in enumerate(_whole(text, path)):
        yield _mapping(row, f"{path}, [{number}]")


def wikitext_pages(path: Path) -> Iterator[Placed]:
    for number, page in enumerate(file_documents(path)):
        yield f"{path}, page {number}", {"page": page}


def squad_rows(path: Path) -> Iterator[Placed]:
    """SQuAD's nesting (article → paragraph → question) as one row per question, as the hub has it."""
    place, whole = _mapping(_whole(_text(path), path), str(path))
    for a, article in enumerate(_list(whole, "data", place)):
        at, article = _mapping(article, f"{place}, data[{a}]")
        for p, paragraph in enumerate(_list(article, "paragraphs", at)):
            inside, paragraph = _mapping(paragraph, f"{at}.paragraphs[{p}]")
            for q, question in enumerate(_list(paragraph, "qas", inside)):
                here, question = _mapping(question, f"{inside}.qas[{q}]")
                answers = [_mapping(answer, f"{here}.answers")[1] for answer in _list(question, "answers", here)]
                yield (
                    here,
                    {
                        "id": question.get("id"),
                        "title": article.get("title"),
                        "context": paragraph.get("context"),
                        "question": question.get("question"),
                        "answers": {key: [answer.get(key) for answer in answers] for key in ("text", "answer_start")},
                    },
                )


def _text(path: Path) -> str:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            return str(file.read())
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise BadArgument("data", str(path), "a complete file in UTF-8", f"fetch it again ({error})") from error


def _object(line: str, place: str) -> Placed:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadArgument(place, line[:60], "a JSON object", f"mend the line ({error})") from error
    return _mapping(value, place)


def _whole(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadArgument("data", str(path), "a JSON file", f"fetch it again ({error})") from error


def _mapping(value: Any, place: str) -> Placed:
    if not isinstance(value, dict):
        raise BadArgument(place, repr(value)[:60], "a JSON object", "mend it or fetch it again")
    return place, value


def _list(row: Row, name: str, place: str) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list):
        raise BadArgument(f"{place}: {name}", repr(value)[:60], "a list", "mend it or fetch it again")
    return value


# ---------------------------------------------------------------- sources


def _is_text(value: Any, row: Row) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _are_choices(value: Any, row: Row) -> bool:
    if not isinstance(value, dict):
        return False
    text, label = value.get("text"), value.get("label")
    return _are_texts(text) and _are_texts(label) and len(text) == len(label) >= 2  # type: ignore[arg-type]


def _are_answers(value: Any, row: Row) -> bool:
    return isinstance(value, dict) and _are_texts(value.get("text")) and bool(value["text"])


def _texts(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, _is_text, "a string that is not blank") for name in names)


def _lines(stem: str) -> tuple[str, str]:
    return f"{stem}.jsonl", f"{stem}.jsonl.gz"


LINES = {
    "train": _lines("train"),
    "validation": (*_lines("validation"), *_lines("valid"), *_lines("val")),
    "test": _lines("test"),
}

SOURCES: dict[str, Source] = {
    "wikitext": Source({"validation": ("valid.txt",), "test": ("test.txt",)}, wikitext_pages, _texts("page")),
    "pile": Source({"validation": LINES["validation"]}, json_lines, _texts("text")),
    "arc": Source(
        LINES,
        json_lines,
        (
            *_texts("question"),
            Field("choices", _are_choices, "{'text': [...], 'label': [...]} of equally many strings, two or more"),
            Field("answerKey", lambda key, row: key in row["choices"]["label"], "one of choices.label"),
        ),
    ),
    "gsm8k": Source(
        LINES,
        json_lines,
        (
            *_texts("question"),
            Field("answer", lambda text, _: isinstance(text, str) and "#### " in text, "a string with '#### RESULT'"),
        ),
    ),
    "math": Source(
        LINES,
        json_lines,
        (
            *_texts("problem"),
            Field(
                "solution",
                lambda text, _: isinstance(text, str) and "\\boxed" in text,
                "a string with its answer in \\boxed",
            ),
        ),
    ),
    "humaneval": Source(
        {"test": _lines("HumanEval")},
        json_lines,
        _texts("task_id", "prompt", "canonical_solution", "test", "entry_point"),
    ),
    "squad": Source(
        {"train": ("train-v1.1.json",), "validation": ("dev-v1.1.json",)},
        squad_rows,
        (
            *_texts("id", "title", "context", "question"),
            Field("answers", _are_answers, "at least one answer, as in SQuAD v1.1 (v2 has questions without any)"),
        ),
    ),
    "samsum": Source(
        {
            "train": ("train.json", *LINES["train"]),
            "validation": ("val.json", *LINES["validation"]),
            "test": ("test.json", *LINES["test"]),
        },
        json_rows,
        _texts("dialogue", "summary"),
    ),
}


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise BadArgument("source", name, f"one of {', '.join(SOURCES)}")
    return SOURCES[name]


# ---------------------------------------------------------------- what lm-eval's tasks take their documents from


class Splits(dict[str, Any]):
    """Split → ``datasets.Dataset``, read when first asked for: a task that needs no train part need not have one."""

    def __init__(self, load: Callable[[str], list[Row]]):
        super().__init__()
        self._load = load

    def __missing__(self, split: str) -> Any:
        from datasets import Dataset  # an extra, and slow to import

        self[split] = Dataset.from_list(self._load(split))
        return self[split]


def splits(
    *,
    source: str,
    folder: str,
    hub: str,
    name: str | None = None,
    hub_splits: dict[str, str] | None = None,
    optional: tuple[str, ...] = (),
    data: str | Path | None = None,
    **ignored: Any,
) -> Splits:
    """Documents of a task: from ``data``/``folder`` if a data folder is given, else from the hub.

    ``name`` is the hub's configuration and ``hub_splits`` its own names of splits. An ``optional`` split that is not in
    the data folder is empty, and said to be. lm-eval passes its task metadata along, hence ``ignored``.

    Raises (when a split is asked for):
        BadArgument: a file that is missing or does not fit.
        TaskDataUnavailable: no data folder, and the hub does not give it.
    """

    def load(split: str) -> list[Row]:
        if data is None:
            return hub_rows(source, hub, name, (hub_splits or {}).get(split, split))
        place = Path(data) / folder
        if split in optional and place.is_dir() and file_of(source, split, place) is None:
            log.warning(
                "%s: no %s split in %s: it counts as empty, and no few-shot prompt can come from it",
                source,
                split,
                place,
            )
            return []
        return read(source, split, place)

    return Splits(load)


def hub_rows(source: str, hub: str, name: str | None, split: str) -> list[Row]:
    """Rows of a hub data set, or of its cache where the hub is out of reach or ``HF_HUB_OFFLINE`` is set.

    Raises:
        TaskDataUnavailable: neither has it.
        BadArgument: rows that do not fit.
    """
    try:
        from datasets import load_dataset

        if reachable():
            found = load_dataset(hub, name, split=split)
        else:
            with offline():
                found = load_dataset(hub, name, split=split)
    except Exception as error:  # the hub client raises dozens of types; all mean the same to the caller
        raise TaskDataUnavailable(
            f"hub={hub!r}, configuration {name!r}, split {split!r}, but it is out of reach "
            f"({type(error).__name__}: {error}); pass a data folder (--emad-data DIR), laid out as "
            "emad_ref.tasks.datasets says"
        ) from error
    placed = ((f"{hub}, {split} row {number}", dict(row)) for number, row in enumerate(found))
    return checked(placed, _source(source).fields, f"{hub} has no rows in {split}")


def world_splits(*, world_task: str, items: int = 500, seed: int = 0, **ignored: Any) -> Splits:
    """``items`` examples of one of the world's own tasks; splits never share an example's seed."""
    names = {"train": "train", "validation": "validate", "test": "evaluate"}

    def load(split: str) -> list[Row]:
        examples = islice(world.examples(world_task, names[split], items, seed), items)  # type: ignore[arg-type]
        return [
            {
                "prompt": example.prompt,
                "answer": example.answer,
                "options": list(example.options),
                "check": example.check,
            }
            for example in examples
        ]

    return Splits(load)
