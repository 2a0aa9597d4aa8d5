"""Rows of published tasks from a local data folder or the hub, and SQuAD and SamSum as input → output pairs.

    rows = read_rows("gsm8k", "test", folder=data / "gsm8k")        # [{"question": …, "answer": …}, …]
    splits(source="gsm8k", folder="gsm8k", hub="openai/gsm8k", name="main", data=…)["test"]   # for lm-eval's tasks

Layout of a data folder (``.jsonl`` may be ``.jsonl.gz`` or ``.jsonl.zst``; a split that is not asked for need not be
there). Behind each, where files as their authors published them may lie instead:

    wikitext-2/ wikitext-103/    valid.txt test.txt                 pages, cut at top-level headings
    pile/                        valid.jsonl                        text
        val.jsonl.zst            the Pile's own
    arc/ARC-Easy/ ARC-Challenge/ train.jsonl validation.jsonl test.jsonl   question, choices {text, label}, answerKey
        ARC-Easy-Test.jsonl      AllenAI's, here or in arc/ARC-V1-Feb2018-2/ARC-Easy/, where the archive has them
    gsm8k/                       train.jsonl test.jsonl             question, answer
    math/SUBJECT/                train.jsonl test.jsonl             problem, solution
        1.json …                 the archive's, one file per problem, in math/test/SUBJECT/ or math/MATH/test/SUBJECT/
        test.jsonl               in math/: all subjects in one file, told apart by ``subject`` or ``type``
    humaneval/                   HumanEval.jsonl                    task_id, prompt, test, entry_point, …
    squad/                       train-v1.1.json dev-v1.1.json      SQuAD v1.1 as published
    samsum/                      train.json val.json test.json      dialogue, summary: out of corpus.7z

Files of the hub's repositories are taken as they are too, in the folders that they have there (parquet read by
pyarrow,
which comes with the extra ``tasks`` and unpacks .zst; SamSum's ``test.csv``). What is found first is read: our names,
then the authors', then the hub's. Every row is checked before any model sees it; an error names file, line and field.

Pairs are read in T5's own form (``seq2seq_pairs.format_source``), from validation and test splits only: a tuned model
has seen the training split. A pair keeps the text that it is about, because questions about one paragraph are not
independent. The seed fixes the order; of two draws with one seed the smaller is the beginning of the larger.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TextIO

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import BadFile, open_regular, parse_json
from emad_ref.text import world
from emad_ref.text.corpora import file_documents, hub_offline, is_hub_reachable
from emad_ref.text.documents import clean_text
from emad_ref.text.seq2seq_pairs import SourceTarget, format_source

Sample = dict[str, Any]
Placed = tuple[str, Sample]  # where a row stands, for messages, and the row

log = logging.getLogger(__name__)


class TaskDataUnavailable(EmadError):
    """Task data that is neither in a data folder nor to be had from the hub."""


@dataclass(frozen=True)
class RowField:
    """``name`` must be in a row and ``fits`` its value; ``expected`` says so in words."""

    name: str
    fits: Callable[[Any, Sample], bool]
    expected: str


@dataclass(frozen=True)
class DatasetSource:
    """One benchmark.

    ``files``     paths of each split's file from the benchmark's folder, whose own name stands for ``{name}``; the
                  first that exists is read. A folder is read file by file.
    ``fields``    what every row must have.
    ``remedy``    how to get the files into place.
    ``json``      rows of a .json file, or of any other whose name does not tell (``READERS``).
    ``row``       a row as published → as the hub has it.
    ``subject``   of a row, where one file holds the rows of several folders.
    """

    files: dict[str, tuple[str, ...]]
    fields: tuple[RowField, ...]
    remedy: str
    json: Callable[[Path], Iterator[Placed]]
    row: Callable[[Sample], Sample] = dict
    subject: Callable[[Sample], str] | None = None


# ---------------------------------------------------------------- reading


def read_rows(source: str, split: str, folder: Path) -> list[Sample]:
    """All rows of ``split`` (train, validation or test) of a folder, checked.

    Raises:
        BadArgument: an unknown source or split, a missing file, a package that a packed file needs, or a row that does
            not fit.
    """
    known, folder = _source(source), Path(os.path.normpath(folder))
    path = split_file(source, split, folder)
    if path is None:
        names = known.files.get(split)
        if names is None:
            raise BadArgument("split", split, f"one of {', '.join(known.files)}, which {source} has")
        held = " or ".join(name.format(name=folder.name) for name in names)
        raise BadArgument("data", str(folder), f"a folder that holds {held}", known.remedy)
    rows: Iterator[Placed] = ((place, known.row(row)) for place, row in _rows_of(path, known))
    if known.subject is not None and path.is_file() and not path.is_relative_to(folder):
        rows = _rows_of_subject(folder.name, known.subject, rows)
    return check_rows(rows, known.fields, f"file {str(path)!r} has no rows of {folder.name}")


def split_file(source: str, split: str, folder: Path) -> Path | None:
    """The file, or the folder of files, that holds ``split``; None where there is none."""
    names = (name.format(name=folder.name) for name in _source(source).files.get(split, ()))
    candidates = (Path(os.path.normpath(folder / name)) for name in names)
    return next((path for path in candidates if path.is_file() or _is_filled(path)), None)


def _rows_of_subject(name: str, subject: Callable[[Sample], str], rows: Iterable[Placed]) -> Iterator[Placed]:
    """Rows of one subject out of a file that holds several."""
    for place, row in rows:
        found = subject(row)
        if not found:
            remedy = "mend the row, or give each subject a folder of its own"
            raise BadArgument(f"{place}: subject", None, "a subject or type, in a file of all subjects", remedy)
        if found == name:
            yield place, row


def _available_splits(source: str, folder: Path) -> list[str]:
    """Splits that a folder has."""
    return [split for split in _source(source).files if split_file(source, split, folder) is not None]


def _is_filled(path: Path) -> bool:
    return path.is_dir() and next(path.glob("*.json"), None) is not None


def _rows_of(path: Path, source: DatasetSource) -> Iterator[Placed]:
    if path.is_dir():
        files = sorted(path.glob("*.json"), key=lambda file: (len(file.stem), file.stem))  # 2.json before 10.json
        return (_mapping(_parse_json(_text(file), file), str(file)) for file in files)
    ending = Path(path.stem).suffix if path.suffix in OPENERS else path.suffix
    return READERS.get(ending, source.json)(path)


def check_rows(rows: Iterable[Placed], fields: Iterable[RowField], empty: str) -> list[Sample]:
    """The rows, each of which has every field with a fitting value; none at all is an error too.

    Texts lose a byte order mark and get \\n for every end of a line (``documents.clean_text``).
    """
    good = []
    for place, row in ((place, _clean(row, place)) for place, row in rows):
        for field in fields:
            value = row.get(field.name)
            if field.name not in row or not field.fits(value, row):
                shown = value if len(repr(value)) <= 80 else repr(value)[:80] + "…"
                raise BadArgument(f"{place}: {field.name}", shown, field.expected, "mend the row or fetch it again")
        good.append(row)
    if not good:
        raise BadArgument("data", empty, "at least one", "fetch it again")
    return good


def _clean(value: Any, place: str) -> Any:
    """``value`` with every text in it clean, whatever it is nested in."""
    if isinstance(value, str):
        return clean_text(value, place)
    if isinstance(value, dict):
        return {name: _clean(item, f"{place}: {name}") for name, item in value.items()}
    return [_clean(item, place) for item in value] if isinstance(value, list) else value


def json_lines(path: Path) -> Iterator[Placed]:
    """Objects, one per line; blank lines are passed over."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _object(line, f"{path}, line {number}")


def csv_rows(path: Path) -> Iterator[Placed]:
    """Rows under the names of the first line."""
    with _opened(path) as file:
        for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
            yield f"{path}, row {number}", dict(row)


def parquet_rows(path: Path) -> Iterator[Placed]:
    """Rows of the hub's own file format."""
    parquet = _pyarrow(path, "parquet", "take the benchmark's .jsonl file instead")
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:  # what pyarrow's own errors are
        raise BadArgument("data", str(path), "a complete parquet file", f"fetch it again ({error})") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def json_rows(path: Path) -> Iterator[Placed]:
    """One JSON array of objects, or objects one per line, by the file's first character."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        yield from json_lines(path)
        return
    for number, row in enumerate(_parse_json(text, path)):
        yield _mapping(row, f"{path}, [{number}]")


def wikitext_pages(path: Path) -> Iterator[Placed]:
    for number, page in enumerate(file_documents(path)):
        yield f"{path}, page {number}", {"page": page}


def squad_rows(path: Path) -> Iterator[Placed]:
    """SQuAD's nesting (article → paragraph → question) as one row per question, as the hub has it."""
    place, whole = _mapping(_parse_json(_text(path), path), str(path))
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


def arc_row(row: Sample) -> Sample:
    """AllenAI's nesting, question {stem, choices [{text, label}]}, as the hub has it; any other row as it is."""
    question = row.get("question")
    if not isinstance(question, dict):
        return row
    choices = question.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return row
    columns = {name: [choice.get(name) for choice in choices] for name in ("text", "label")}
    return row | {"question": question.get("stem"), "choices": columns}


def math_subject(row: Sample) -> str:
    """The folder of a problem: Counting & Probability → counting_and_probability; "" where a row does not say."""
    named = row.get("subject") or row.get("type") or ""
    return str(named).lower().replace("&", "and").replace(" ", "_")


def _text(path: Path) -> str:
    with _opened(path) as file:
        return str(file.read())


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The file's text, unpacked, with its ends of lines as they are; U+2028, which JSON strings may hold, is none.

    Raises:
        BadArgument: a damaged file, or no package to unpack it.
    """
    opener = OPENERS.get(path.suffix, nullcontext)
    with open_regular(path, "data") as packed:
        try:
            with opener(packed) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
                yield file
        except (UnicodeDecodeError, zlib.error, EOFError, csv.Error, OSError) as error:
            raise BadFile("data", path, "a complete file in UTF-8", str(error), "fetch it again") from error


def _unpacked_zstd(packed: IO[bytes]) -> Any:
    path = Path(packed.name)  # as ``reading`` opened it
    arrow = _pyarrow(path, "", f"unpack it yourself: zstd -d {path.name}")
    return arrow.input_stream(packed, compression="zstd")


OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": _unpacked_zstd}
READERS: dict[str, Callable[[Path], Iterator[Placed]]] = {
    ".jsonl": json_lines,
    ".csv": csv_rows,
    ".parquet": parquet_rows,
}


def _pyarrow(path: Path, part: str, otherwise: str) -> Any:
    if find_spec("pyarrow") is None:
        raise BadArgument(
            "data", str(path), "the package pyarrow, to read it", f"pip install 'pytest-emad[tasks]', or {otherwise}"
        )
    return import_module(f"pyarrow.{part}".removesuffix("."))


def _object(line: str, place: str) -> Placed:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise BadArgument(place, line[:60], "a JSON object", f"mend the line ({error})") from error
    return _mapping(value, place)


def _parse_json(text: str, path: Path) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadArgument("data", str(path), "a JSON file", f"fetch it again ({error})") from error


def _mapping(value: Any, place: str) -> Placed:
    if not isinstance(value, dict):
        raise BadArgument(place, repr(value)[:60], "a JSON object", "mend it or fetch it again")
    return place, value


def _list(row: Sample, name: str, place: str) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list):
        raise BadArgument(f"{place}: {name}", repr(value)[:60], "a list", "mend it or fetch it again")
    return value


# ---------------------------------------------------------------- sources


def _is_text(value: Any, row: Sample) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _are_choices(value: Any, row: Sample) -> bool:
    if not isinstance(value, dict):
        return False
    text, label = value.get("text"), value.get("label")
    return _are_texts(text) and _are_texts(label) and len(text) == len(label) >= 2  # type: ignore[arg-type]


def _are_answers(value: Any, row: Sample) -> bool:
    return isinstance(value, dict) and _are_texts(value.get("text")) and bool(value["text"])


def _texts(*names: str) -> tuple[RowField, ...]:
    return tuple(RowField(name, _is_text, "a string that is not blank") for name in names)


def _lines(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}.jsonl{packed}" for stem in stems for packed in ("", ".gz", ".zst"))


def _hub(split: str, folder: str = "") -> str:
    """A split's one file in a repository of the hub."""
    return f"{folder}{split}-00000-of-00001.parquet"


LINES = {"train": _lines("train"), "validation": _lines("validation", "valid", "val"), "test": _lines("test")}

SOURCES: dict[str, DatasetSource] = {
    "wikitext": DatasetSource(
        {"validation": ("valid.txt",), "test": ("test.txt",)},
        _texts("page"),
        "put WikiText's raw files there under these names",
        wikitext_pages,
    ),
    "pile": DatasetSource(
        {"validation": LINES["validation"]},
        _texts("text"),
        "put val.jsonl.zst of the Pile there, or unpack it first",
        json_lines,
    ),
    "arc": DatasetSource(
        {
            split: (
                *LINES[split],
                f"{{name}}-{theirs}.jsonl",
                f"../ARC-V1-Feb2018-2/{{name}}/{{name}}-{theirs}.jsonl",
                _hub(split),
            )
            for split, theirs in {"train": "Train", "validation": "Dev", "test": "Test"}.items()
        },
        (
            RowField("question", _is_text, "a string that is not blank, or AllenAI's {'stem': …, 'choices': [{…}, …]}"),
            RowField("choices", _are_choices, "{'text': [...], 'label': [...]} of equally many strings, two or more"),
            RowField("answerKey", lambda key, row: key in row["choices"]["label"], "one of choices.label"),
        ),
        "unzip ARC-V1-Feb2018.zip inside arc/, or put the files of the hub's allenai/ai2_arc there",
        json_lines,
        arc_row,
    ),
    "gsm8k": DatasetSource(
        {split: (*LINES[split], _hub(split, "main/")) for split in ("train", "test")},
        (
            *_texts("question"),
            RowField(
                "answer", lambda text, _: isinstance(text, str) and "#### " in text, "a string with '#### RESULT'"
            ),
        ),
        "put the .jsonl files of openai/grade-school-math there",
        json_lines,
    ),
    "math": DatasetSource(
        {
            split: (
                *LINES[split],
                f"../{split}/{{name}}",
                f"../MATH/{split}/{{name}}",
                *(f"../{name}" for name in LINES[split]),
                _hub(split),
            )
            for split in ("train", "test")
        },
        (
            *_texts("problem"),
            RowField(
                "solution",
                lambda text, _: isinstance(text, str) and "\\boxed" in text,
                "a string with its answer in \\boxed",
            ),
        ),
        "unpack MATH.tar inside math/, so that it holds MATH/test/SUBJECT/1.json and so on",
        json_lines,
        subject=math_subject,
    ),
    "humaneval": DatasetSource(
        {"test": (*_lines("HumanEval"), _hub("test", "openai_humaneval/"))},
        _texts("task_id", "prompt", "canonical_solution", "test", "entry_point"),
        "put HumanEval.jsonl.gz of openai/human-eval there",
        json_lines,
    ),
    "squad": DatasetSource(
        {
            "train": ("train-v1.1.json", _hub("train", "plain_text/")),
            "validation": ("dev-v1.1.json", _hub("validation", "plain_text/")),
        },
        (
            *_texts("id", "title", "context", "question"),
            RowField("answers", _are_answers, "at least one answer, as in SQuAD v1.1 (v2 has questions without any)"),
        ),
        "put the published files of SQuAD v1.1 there",
        squad_rows,
    ),
    "samsum": DatasetSource(
        {
            "train": ("train.json", *LINES["train"], "train.csv"),
            "validation": ("val.json", *LINES["validation"], "validation.csv"),
            "test": ("test.json", *LINES["test"], "test.csv"),
        },
        _texts("dialogue", "summary"),
        "unpack corpus.7z there (7z x corpus.7z)",
        json_rows,
    ),
}


def _source(name: str) -> DatasetSource:
    if name not in SOURCES:
        raise BadArgument("source", name, f"one of {', '.join(SOURCES)}")
    return SOURCES[name]


# ---------------------------------------------------------------- what lm-eval's tasks take their documents from


class LazySplits(dict[str, Any]):
    """Split → ``datasets.Dataset``, read when first asked for: a task that needs no train part need not have one."""

    def __init__(self, load: Callable[[str], list[Sample]]):
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
) -> LazySplits:
    """Documents of a task: from ``data``/``folder`` if a data folder is given, else from the hub.

    ``name`` is the hub's configuration and ``hub_splits`` its own names of splits. An ``optional`` split that is not in
    the data folder, where others are, is empty, and said to be. lm-eval passes its task metadata along: ``ignored``.

    Raises (when a split is asked for):
        BadArgument: a file that is missing or does not fit.
        TaskDataUnavailable: no data folder, and the hub does not give it.
    """

    def load(split: str) -> list[Sample]:
        if data is None:
            return hub_rows(source, hub, name, (hub_splits or {}).get(split, split))
        place = Path(data) / folder
        if split in optional and split not in (held := _available_splits(source, place)) and held:
            log.warning(
                "%s: no %s split in %s: it counts as empty, and no few-shot prompt can come from it",
                source,
                split,
                place,
            )
            return []
        return read_rows(source, split, place)

    return LazySplits(load)


def hub_rows(source: str, hub: str, name: str | None, split: str) -> list[Sample]:
    """Rows of a hub data set, or of its cache where the hub is out of reach or ``HF_HUB_OFFLINE`` is set.

    Raises:
        TaskDataUnavailable: neither has it.
        BadArgument: rows that do not fit.
    """
    try:
        from datasets import load_dataset

        if is_hub_reachable():
            found = load_dataset(hub, name, split=split)
        else:
            with hub_offline():
                found = load_dataset(hub, name, split=split)
    except Exception as error:  # the hub client raises dozens of types; all mean the same to the caller
        raise TaskDataUnavailable(
            f"hub={hub!r}, configuration {name!r}, split {split!r}, but it is out of reach "
            f"({type(error).__name__}: {error}); pass a data folder (--emad-data DIR), laid out as "
            "emad_ref.tasks.datasets says"
        ) from error
    placed = ((f"{hub}, {split} row {number}", dict(row)) for number, row in enumerate(found))
    return check_rows(_with_text(placed), _source(source).fields, f"{hub} has no rows in {split}")


def _with_text(rows: Iterable[Placed]) -> Iterator[Placed]:
    """The rows that hold text. The others are left out by name, because they cannot be mended on the hub."""
    for place, row in rows:
        try:
            yield place, _clean(row, place)
        except BadArgument as error:
            log.warning("left out: %s", error)


def world_splits(*, world_task: str, items: int = 500, seed: int = 0, **ignored: Any) -> LazySplits:
    """``items`` examples of one of the world's own tasks; splits share none."""
    names = {"train": "train", "validation": "validate", "test": "evaluate"}

    def load(split: str) -> list[Sample]:
        examples = world.examples(world_task, names[split], items, seed)  # type: ignore[arg-type]
        return [
            {
                "prompt": example.prompt,
                "answer": example.answer,
                "check": example.check,
                "guess": example.chance,
            }
            for example in examples
        ]

    return LazySplits(load)


@dataclass(frozen=True)
class PairDataset:
    """``splits``: of ``datasets.SOURCES``, the first that a folder has is asked; ``text``: the field that is read.

    ``pair``: row → source, answers.
    """

    splits: tuple[str, ...]
    text: str
    pair: Callable[[Sample], tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class PublishedPairs:
    """``pairs`` of the ``of`` that ``file`` holds."""

    file: Path
    of: int
    pairs: tuple[SourceTarget, ...]


PUBLISHED: dict[str, PairDataset] = {
    "squad": PairDataset(
        ("validation",),
        "context",
        lambda row: (format_source("qa", row["context"], row["question"]), tuple(row["answers"]["text"])),
    ),
    "samsum": PairDataset(
        ("validation", "test"), "dialogue", lambda row: (format_source("summary", row["dialogue"]), (row["summary"],))
    ),
}


def task_files(task: str) -> tuple[str, ...]:
    """Files of a data folder, any of which holds ``task``: the one to prefer first, other endings left out.

    Raises:
        BadArgument: unknown task.
    """
    return tuple(f"{task}/{SOURCES[task].files[split][0]}" for split in _published_task(task).splits)


def has_task_file(task: str, data: Path) -> bool:
    """Whether the data folder has a file of ``task``. Raises as ``task_files``."""
    return _available_split(task, data) is not None


def load_pairs(task: str, data: Path, count: int | None, seed: int = 0) -> PublishedPairs:
    """``count`` pairs of ``task``, or all where there are fewer, or for None; the first answer is the target.

    Raises:
        BadArgument: unknown task, a folder without a file of it, a row that does not fit.
    """
    split = _available_split(task, data)
    if split is None:
        raise BadArgument(
            "data", str(data), f"a folder that holds {' or '.join(task_files(task))}", "put the file there"
        )
    file = split_file(task, split, data / task)
    assert file is not None, "_split names a split whose file is there"
    rows = read_rows(task, split, data / task)
    random.Random(f"{task}/{split}/{seed}").shuffle(rows)
    return PublishedPairs(file, len(rows), tuple(_source_target(task, row) for row in rows[:count]))


def _published_task(task: str) -> PairDataset:
    if task not in PUBLISHED:
        raise BadArgument("task", task, f"one of {', '.join(PUBLISHED)}")
    return PUBLISHED[task]


def _available_split(task: str, data: Path) -> str | None:
    """The split whose file is there and is asked."""
    return next((split for split in _published_task(task).splits if split_file(task, split, data / task)), None)


def _source_target(task: str, row: Sample) -> SourceTarget:
    source, answers = PUBLISHED[task].pair(row)
    return SourceTarget(task, source, answers[0], answers, row[PUBLISHED[task].text])
