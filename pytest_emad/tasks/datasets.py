"""Rows of published tasks from a local data folder or the hub, and SQuAD and SamSum as source-target pairs.

    rows = read_rows("gsm8k", "test", folder=data / "gsm8k")        # [{"question": …, "answer": …}, …]
    load_task_splits(source="gsm8k", folder="gsm8k", hub="openai/gsm8k", name="main", data=…)["test"]  # for lm-eval

A data folder has WikiText's text and JSON lines with the hub's fields; ``.jsonl`` may be ``.jsonl.gz``, and only
requested splits are needed. The package ``datasets`` reads every other format, and writes this one:
``load_dataset(…)["test"].to_json("test.jsonl")``.

    wikitext-2/ wikitext-103/    valid.txt test.txt                        pages, cut at top-level headings
    pile/                        valid.jsonl                               text
    arc/ARC-Easy/ ARC-Challenge/ train.jsonl validation.jsonl test.jsonl   question, choices {text, label}, answerKey
    gsm8k/                       train.jsonl test.jsonl                    question, answer
    math/SUBJECT/                train.jsonl test.jsonl                    problem, solution
    humaneval/                   HumanEval.jsonl                           task_id, prompt, test, entry_point, …
    squad/                       train.jsonl validation.jsonl              context, question, answers {text, …}, …
    samsum/                      train.jsonl validation.jsonl test.jsonl   dialogue, summary

Every row is checked before a model sees it, also those of the hub; an error names file, line and field.

Pairs have T5's form (``seq2seq_pairs.format_source``) and come from validation and test splits only, because a tuned
model has seen the training split. A pair keeps its text, because questions about one paragraph are not independent.
The seed fixes the order; a smaller count gives the beginning of a larger one.
"""

from __future__ import annotations

import gzip
import io
import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument, EmadError, MissingExtra, require_extra
from emad_ref.files import BadFile, open_regular_file, parse_json
from emad_ref.text import world
from emad_ref.text.corpora import force_hub_offline, is_hub_reachable, iterate_file_documents
from emad_ref.text.documents import normalize_newlines_and_bom
from emad_ref.text.seq2seq_pairs import SourceTarget, format_source

Sample = dict[str, Any]
Placed = tuple[str, Sample]  # place of a row, for messages, and the row
Check = Callable[[Any, Sample], bool]  # check of a value, given its row

log = logging.getLogger(__name__)


class TaskDataUnavailable(EmadError):
    """Raised if task data is neither in a data folder nor available from the hub."""


@dataclass(frozen=True)
class DatasetFileFormat:
    """One benchmark.

    ``files``   name of each split's file in the benchmark's folder; a name in .jsonl may have .gz behind it.
    ``fields``  required fields of every row: name → (check of its value, description of valid values).
    ``remedy``  how to get the files into place.
    """

    files: dict[str, str]
    fields: dict[str, tuple[Check, str]]
    remedy: str


# ---------------------------------------------------------------- reading


def read_rows(source: str, split: str, folder: Path) -> list[Sample]:
    """All rows of ``split`` (train, validation or test) of a folder, checked.

    Raises:
        BadArgument: an unknown source or split, a missing file, or a row that does not fit.
    """
    benchmark = _source(source)
    if split not in benchmark.files:
        raise BadArgument("split", split, f"one of {', '.join(benchmark.files)}, which {source} has")
    path = find_split_file(source, split, folder)
    if path is None:
        raise BadArgument("data", str(folder), f"a folder that holds {benchmark.files[split]}", benchmark.remedy)
    rows = iterate_wikitext_pages(path) if path.suffix == ".txt" else iterate_json_lines(path)
    return require_valid_rows(rows, benchmark.fields, f"file {str(path)!r} has no rows of {folder.name}")


def find_split_file(source: str, split: str, folder: Path) -> Path | None:
    """The file of ``split``; None without one."""
    name = _source(source).files.get(split)
    if name is None:
        return None
    named = (folder / name, folder / f"{name}.gz") if name.endswith(".jsonl") else (folder / name,)
    return next((path for path in named if path.is_file()), None)


def require_valid_rows(rows: Iterable[Placed], fields: dict[str, tuple[Check, str]], empty: str) -> list[Sample]:
    """``rows``, checked: at least one, and each has every field with a valid value.

    Texts lose a byte order mark and get \\n for every end of a line (``documents.normalize_newlines_and_bom``).
    """
    good = []
    for place, row in ((place, _clean(row, place)) for place, row in rows):
        for name, (fits, expected) in fields.items():
            value = row.get(name)
            if name not in row or not fits(value, row):
                excerpt = value if len(repr(value)) <= 80 else repr(value)[:80] + "…"
                raise BadArgument(f"{place}: {name}", excerpt, expected, "mend the row or fetch it again")
        good.append(row)
    if not good:
        raise BadArgument("data", empty, "at least one", "fetch it again")
    return good


def _clean(value: Any, place: str) -> Any:
    """``value`` with every text in it clean, at any depth."""
    if isinstance(value, str):
        return normalize_newlines_and_bom(value, place)
    if isinstance(value, dict):
        return {name: _clean(item, f"{place}: {name}") for name, item in value.items()}
    return [_clean(item, place) for item in value] if isinstance(value, list) else value


def _text(path: Path) -> str:
    """The decompressed text of a file, ends of lines unchanged. Raises BadFile."""
    with open_regular_file(path, "data") as file:
        try:
            content = gzip.decompress(file.read()) if path.suffix == ".gz" else file.read()
            return content.decode("utf-8-sig")
        except (UnicodeDecodeError, zlib.error, EOFError, OSError) as error:
            raise BadFile("data", path, "a complete file in UTF-8", str(error), "fetch it again") from error


def iterate_json_lines(path: Path) -> Iterator[Placed]:
    """Objects, one per line; blank lines are skipped. U+2028, which JSON strings may hold, ends no line."""
    for number, line in enumerate(io.StringIO(_text(path), newline=""), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                value = parse_json(line)
            except ValueError as error:
                raise BadArgument(place, line[:60], "a JSON object", f"mend the line ({error})") from error
            if not isinstance(value, dict):
                raise BadArgument(place, repr(value)[:60], "a JSON object", "mend it or fetch it again")
            yield place, value


def iterate_wikitext_pages(path: Path) -> Iterator[Placed]:
    for number, page in enumerate(iterate_file_documents(path)):
        yield f"{path}, page {number}", {"page": page}


# ---------------------------------------------------------------- sources


def _is_text(value: Any, row: Sample) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _are_choices(value: Any, row: Sample) -> bool:
    text, label = (value.get("text"), value.get("label")) if isinstance(value, dict) else (None, None)
    return _are_texts(text) and _are_texts(label) and len(text) == len(label) >= 2  # type: ignore[arg-type]


def _are_answers(value: Any, row: Sample) -> bool:
    return isinstance(value, dict) and _are_texts(value.get("text")) and bool(value["text"])


def _contains(part: str) -> Check:
    return lambda value, _: isinstance(value, str) and part in value


def _texts(*names: str) -> dict[str, tuple[Check, str]]:
    return dict.fromkeys(names, (_is_text, "a string that is not blank"))


def _splits(*names: str) -> dict[str, str]:
    return {name: f"{name}.jsonl" for name in names}


CONVERTED = "put JSON lines there, e.g. by the package datasets: load_dataset(…)['test'].to_json('test.jsonl')"
SOURCES: dict[str, DatasetFileFormat] = {
    "wikitext": DatasetFileFormat(
        {"validation": "valid.txt", "test": "test.txt"},
        _texts("page"),
        "put WikiText's raw files there under these names",
    ),
    "pile": DatasetFileFormat({"validation": "valid.jsonl"}, _texts("text"), CONVERTED),
    "arc": DatasetFileFormat(
        _splits("train", "validation", "test"),
        _texts("question")
        | {
            "choices": (_are_choices, "{'text': [...], 'label': [...]} of equally many strings, two or more"),
            "answerKey": (lambda key, row: key in row["choices"]["label"], "one of choices.label"),
        },
        CONVERTED,
    ),
    "gsm8k": DatasetFileFormat(
        _splits("train", "test"),
        _texts("question") | {"answer": (_contains("#### "), "a string with '#### RESULT'")},
        "put the .jsonl files of openai/grade-school-math there",
    ),
    "math": DatasetFileFormat(
        _splits("train", "test"),
        _texts("problem") | {"solution": (_contains("\\boxed"), "a string with its answer in \\boxed")},
        CONVERTED,
    ),
    "humaneval": DatasetFileFormat(
        {"test": "HumanEval.jsonl"},
        _texts("task_id", "prompt", "canonical_solution", "test", "entry_point")
        | {"entry_point": (lambda name, _: isinstance(name, str) and name.isidentifier(), "the name of a function")},
        "put HumanEval.jsonl.gz of openai/human-eval there",
    ),
    "squad": DatasetFileFormat(
        _splits("train", "validation"),
        _texts("id", "title", "context", "question")
        | {"answers": (_are_answers, "at least one answer, as in SQuAD v1.1 (v2 has questions without any)")},
        CONVERTED,
    ),
    "samsum": DatasetFileFormat(
        _splits("train", "validation", "test"),
        _texts("dialogue", "summary"),
        CONVERTED,
    ),
}


def _source(name: str) -> DatasetFileFormat:
    if name not in SOURCES:
        raise BadArgument("source", name, f"one of {', '.join(SOURCES)}")
    return SOURCES[name]


# ---------------------------------------------------------------- documents of lm-eval's tasks


class LazySplits(dict[str, Any]):
    """Split → ``datasets.Dataset``, read at first access, so a task may lack a split that it does not use."""

    def __init__(self, load: Callable[[str], list[Sample]]):
        super().__init__()
        self._load = load

    def __missing__(self, split: str) -> Any:
        from datasets import Dataset  # an extra, and slow to import

        self[split] = Dataset.from_list(self._load(split))
        return self[split]


def load_task_splits(
    *,
    source: str,
    folder: str,
    hub: str,
    name: str | None = None,
    hub_splits: dict[str, str] | None = None,
    optional: tuple[str, ...] = (),
    data: str | Path | None = None,
    **ignored: Any,
) -> LazySplits:
    """Documents of a task: from ``data``/``folder`` if a data folder is given, else from the hub.

    ``name`` is the hub's configuration and ``hub_splits`` its names of splits. An ``optional`` split that is missing
    from the data folder is empty, with a warning. ``ignored`` takes lm-eval's further task metadata.

    Raises (at the first access of a split):
        BadArgument: a file that is missing or invalid.
        TaskDataUnavailable: no data folder, and the hub is unreachable.
    """

    def load(split: str) -> list[Sample]:
        if data is None:
            return load_hub_rows(source, hub, name, (hub_splits or {}).get(split, split))
        place = Path(data) / folder
        available = [name for name in _source(source).files if find_split_file(source, name, place) is not None]
        if split in optional and split not in available and available:
            left = "it counts as empty and gives no few-shot examples"
            log.warning("%s: no %s split in %s: %s", source, split, place, left)
            return []
        return read_rows(source, split, place)

    return LazySplits(load)


def load_hub_rows(source: str, hub: str, name: str | None, split: str) -> list[Sample]:
    """Rows of a hub data set; from its cache if the hub is unreachable or ``HF_HUB_OFFLINE`` is set.

    Raises:
        TaskDataUnavailable: neither has it.
        BadArgument: invalid rows.
    """
    try:
        require_extra(f"hub={hub!r}", "datasets", alternative="pass a data folder (pytest: --emad-data DIR)")
        from datasets import load_dataset

        with nullcontext() if is_hub_reachable() else force_hub_offline():
            rows = load_dataset(hub, name, split=split)
    except MissingExtra as error:
        raise TaskDataUnavailable(str(error)) from error
    except Exception as error:  # the hub client raises dozens of types; all mean the same to the caller
        raise TaskDataUnavailable(
            f"hub={hub!r}, configuration {name!r}, split {split!r}, but it is out of reach "
            f"({type(error).__name__}: {error}); pass a data folder (pytest: --emad-data DIR; lm-eval: "
            """--metadata '{"data": "DIR"}'), laid out as pytest_emad.tasks.datasets says"""
        ) from error
    placed = ((f"{hub}, {split} row {number}", dict(row)) for number, row in enumerate(rows))
    return require_valid_rows(_with_text(placed), _source(source).fields, f"{hub} has no rows in {split}")


def _with_text(rows: Iterable[Placed]) -> Iterator[Placed]:
    """The rows with text; a warning names the others, which a user cannot correct on the hub."""
    for place, row in rows:
        try:
            yield place, _clean(row, place)
        except BadArgument as error:
            log.warning("left out: %s", error)


def generate_world_splits(*, world_task: str, items: int = 500, seed: int = 0, **ignored: Any) -> LazySplits:
    """``items`` examples per split of one of the world's tasks; splits are disjoint."""
    names = {"train": "train", "validation": "validate", "test": "evaluate"}

    def load(split: str) -> list[Sample]:
        examples = world.generate_examples(world_task, names[split], items, seed)  # type: ignore[arg-type]
        return [
            {"prompt": each.prompt, "answer": each.answer, "check": each.check, "guess": each.chance_accuracy}
            for each in examples
        ]

    return LazySplits(load)


# ---------------------------------------------------------------- source-target pairs


@dataclass(frozen=True)
class PublishedPairs:
    """``pairs`` drawn from the ``of`` pairs of ``file``."""

    file: Path
    of: int
    pairs: tuple[SourceTarget, ...]


# task → its splits, the preferred one first (SQuAD's test set was never published), and row → text, source, answers
PUBLISHED: dict[str, tuple[tuple[str, ...], Callable[[Sample], tuple[str, str, tuple[str, ...]]]]] = {
    "squad": (
        ("validation",),
        lambda row: (
            row["context"],
            format_source("qa", row["context"], row["question"]),
            tuple(row["answers"]["text"]),
        ),
    ),
    "samsum": (
        ("validation", "test"),
        lambda row: (row["dialogue"], format_source("summary", row["dialogue"]), (row["summary"],)),
    ),
}


def task_file_names(task: str) -> tuple[str, ...]:
    """Names of files with ``task``, the preferred one first.

    Raises:
        BadArgument: unknown task.
    """
    return tuple(f"{task}/{SOURCES[task].files[split]}" for split in _pair_splits(task))


def has_task_file(task: str, data: Path) -> bool:
    """Whether the data folder has a file of ``task``. Raises as ``task_file_names``."""
    return any(find_split_file(task, split, data / task) for split in _pair_splits(task))


def load_seq2seq_pairs(task: str, data: Path, count: int | None, seed: int = 0) -> PublishedPairs:
    """At most ``count`` pairs of ``task``, all for None; the first answer is the target.

    Raises:
        BadArgument: an unknown task, a folder without a file of it, an invalid row.
    """
    for split in _pair_splits(task):
        if (file := find_split_file(task, split, data / task)) is not None:
            break
    else:
        folder_text = f"a folder that holds {' or '.join(task_file_names(task))}"
        raise BadArgument("data", str(data), folder_text, "put the file there")
    rows = read_rows(task, split, data / task)
    random.Random(f"{task}/{split}/{seed}").shuffle(rows)
    read = map(PUBLISHED[task][1], rows[:count])
    pairs = (SourceTarget(task, source, answers[0], answers, text) for text, source, answers in read)
    return PublishedPairs(file, len(rows), tuple(pairs))


def _pair_splits(task: str) -> tuple[str, ...]:
    if task not in PUBLISHED:
        raise BadArgument("task", task, f"one of {', '.join(PUBLISHED)}")
    return PUBLISHED[task][0]
