"""Reads what ``lm_eval --log_samples --output_path OUT`` writes (lm-eval 0.4.13).

``OUT/MODEL/samples_TASK_DATE.jsonl`` has one row per document and filter: ``doc_id``, ``doc``, ``target``,
``arguments``, ``resps``, ``filtered_resps``, ``filter``, ``metrics`` (names), hashes, and each metric as a key of its
own. A number or boolean is a score of the item. A list is an input of a metric over all items (f1, mcc, perplexity)
and is left out by name. Repeats lie inside ``resps`` under one score.

``OUT/MODEL/results_DATE.json`` has the direction of each metric, the number of documents, and the groups. It does not
say how a group weighs its tasks, so the weights are inferred from the group's own score: the mean over items or the
mean over tasks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emad_ref.files import BadFile, is_file, open_regular_file, read_json
from pytest_emad.accuracy.items import (
    Evaluation,
    ItemTexts,
    Omission,
    ScoreColumns,
    ScoredTask,
    TaskGroup,
    choose_latest_by_task,
    require_distinct_ids,
    require_some_items,
)

DATE = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?"
SAMPLES_NAME = re.compile(rf"samples_(?P<task>.+)_(?P<date>{DATE})\.jsonl")
RESULTS_NAME = re.compile(rf".+_(?P<date>{DATE})\.json")
REQUIRED = ("doc_id", "filter", "metrics", "doc_hash", "prompt_hash", "target_hash")
AGAIN = "evaluate again with lm_eval --log_samples"
CLOSE = 1e-9  # of a group's score and the mean of its tasks: sums in another order


@dataclass(frozen=True)
class SampleFile:
    """A file of samples, and its task and date by its name."""

    path: Path
    task: str
    date: str


@dataclass
class _FilterRows:
    """Rows of one filter while a file is read; ``places``: offset and length of each row."""

    columns: ScoreColumns
    ids: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    clusters: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)


def list_sample_files(folder: Path) -> list[SampleFile]:
    """Files of samples directly in ``folder``, by name."""
    found = ((path, SAMPLES_NAME.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return [SampleFile(path, match["task"], match["date"]) for path, match in found if match]


def find_sample_files(path: Path, argument: str) -> list[SampleFile]:
    """The files of samples of a file, a model's folder, or the folder above one model; [] if there are none.

    Raises:
        BadFile: samples of several models.
    """
    if is_file(path):
        match = SAMPLES_NAME.fullmatch(path.name)
        return [SampleFile(path, match["task"], match["date"])] if match else []
    if files := list_sample_files(path):
        return files
    below = {
        folder: files for folder in sorted(path.iterdir()) if folder.is_dir() and (files := list_sample_files(folder))
    }
    if len(below) > 1:
        names = ", ".join(folder.name for folder in below)
        raise BadFile(argument, path, "samples of one model", f"it holds {names}", "name one of these folders")
    return next(iter(below.values()), [])


def read_lm_eval_samples(files: Sequence[SampleFile], path: Path, argument: str, cluster: str = "") -> Evaluation:
    """The evaluation in ``files``; of several dates of one task the latest counts.

    Args:
        path: as the user named it.
        argument: the name of the argument for messages.
        cluster: a field of ``doc``: items with one value of it depend on each other.

    Raises:
        BadFile: a damaged or truncated file, no metric with a number per item, NaN, ids that repeat.
    """
    latest, omissions, notes = choose_latest_by_task(
        ((file.task, file) for file in files), lambda file: file.date, lambda file: file.path, "file", "dates"
    )
    results = {file.date: _read_results(file, argument) for file in latest.values()}
    if missing := sorted({file.path.name for file in latest.values() if results[file.date] is None}):
        named = missing[0] + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        notes.append(f"no results_DATE.json beside {named}: a higher score is taken as better, and no group is known")
    tasks: list[ScoredTask] = []
    for file in latest.values():
        read, left_out = _read_task(file, results[file.date] or {}, argument, cluster)
        tasks += read
        omissions += left_out
    groups: list[TaskGroup] = []
    for date, result in results.items():
        found, left_out = _find_groups(result or {}, {task for task, file in latest.items() if file.date == date})
        groups += found
        omissions += left_out
    models = {str(result["model_name"]) for result in results.values() if result and result.get("model_name")}
    run = ",".join(sorted({file.date for file in latest.values()}))
    return Evaluation(path, "lm-eval", ", ".join(sorted(models)), run, tasks, groups, omissions, notes)


def _read_results(file: SampleFile, argument: str) -> dict[str, Any] | None:
    """The results of the same date, or None."""
    for path in sorted(file.path.parent.iterdir()):
        match = RESULTS_NAME.fullmatch(path.name)
        if match and match["date"] == file.date:
            found: dict[str, Any] = read_json(path, argument, dict, remedy=AGAIN)
            return found
    return None


def _read_task(
    file: SampleFile, results: Mapping[str, Any], argument: str, cluster: str
) -> tuple[list[ScoredTask], list[Omission]]:
    by_filter: dict[str, _FilterRows] = {}
    for number, place, row in _iterate_rows(file.path, argument):
        if missing := [name for name in REQUIRED if name not in row]:
            reason = f"line {number} has no {missing[0]}"
            raise BadFile(argument, file.path, "rows of lm_eval --log_samples", reason, AGAIN)
        rows = by_filter.get(row["filter"])
        if rows is None:
            rows = by_filter[row["filter"]] = _FilterRows(ScoreColumns(argument, file.path, file.task))
        if absent := [name for name in row["metrics"] if name not in row]:
            reason = f"line {number} lists {absent[0]} among its metrics but has no such key"
            raise BadFile(argument, file.path, "rows of lm_eval --log_samples", reason, AGAIN)
        rows.columns.add_row((name, row[name]) for name in row["metrics"])
        rows.ids.append(str(row["doc_id"]))
        rows.documents.append(row["doc_hash"])
        rows.prompts.append(row["prompt_hash"])
        rows.targets.append(row["target_hash"])
        rows.clusters.append(_cluster_of(row, cluster, file.path, number, argument) if cluster else row["doc_hash"])
        rows.places.append(place)
    require_some_items(argument, file.path, len(by_filter))
    directions = _table(results, "higher_is_better").get(file.task) or {}
    tasks, omissions = [], []
    for name, rows in by_filter.items():
        _require_complete(file, name, len(rows.ids), results, argument)
        require_distinct_ids(argument, file.path, f"{file.task}, filter {name}", rows.ids)
        scores, left_out = rows.columns.finish(lambda metric: directions.get(metric) is not False)
        omissions += left_out
        columns = (rows.ids, rows.documents, rows.prompts, rows.targets, rows.clusters)
        reader = _TextReader(file.path, argument, rows.places)
        tasks.append(ScoredTask(file.task, name, *columns, scores, file.path, reader))
    return tasks, omissions


def _iterate_rows(path: Path, argument: str) -> Iterator[tuple[int, tuple[int, int], dict[str, Any]]]:
    """(Number of the line, its offset and length, its content).

    ``json.loads`` alone reads 14,000 rows with their documents in a second; the strict parser needs five.
    """
    offset = 0
    with open_regular_file(path, argument) as file:
        for number, line in enumerate(file, start=1):
            length = len(line)
            if not line.isspace():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    end = "" if line.endswith(b"\n") else "; the file ends inside it, so it is truncated"
                    reason = f"line {number} is no JSON: {error}{end}"
                    raise BadFile(argument, path, "one JSON object a line", reason, AGAIN) from error
                if not isinstance(row, dict):
                    reason = f"line {number} is a {type(row).__name__}"
                    raise BadFile(argument, path, "one JSON object a line", reason, AGAIN)
                yield number, (offset, length), row
            offset += length


def _cluster_of(row: Mapping[str, Any], cluster: str, path: Path, number: int, argument: str) -> str:
    document = row.get("doc")
    if not isinstance(document, dict) or cluster not in document:
        known = ", ".join(document) if isinstance(document, dict) else "none"
        reason = f"line {number} has no field {cluster!r} in doc, but {known}"
        raise BadFile(argument, path, "the field of --cluster in every document", reason, "name a field that it has")
    return json.dumps(document[cluster], sort_keys=True)


def _require_complete(file: SampleFile, name: str, rows: int, results: Mapping[str, Any], argument: str) -> None:
    """Refuse fewer rows than the results count."""
    counts = _table(results, "n-samples").get(file.task) or {}
    scored = counts.get("effective")
    if isinstance(scored, int) and rows < scored:
        reason = f"filter {name} has {rows:,} rows, but {file.date}'s results count {scored:,}: it is truncated"
        raise BadFile(argument, file.path, "a row for every scored document", reason, AGAIN)


def _table(results: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = results.get(name)
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------- groups


def _find_groups(results: Mapping[str, Any], tasks: set[str]) -> tuple[list[TaskGroup], list[Omission]]:
    """Outermost groups with a score of their own, and members; a group whose weights cannot be inferred is left out."""
    members = _table(results, "group_subtasks")
    scores = {group: _scores_of(_table(_table(results, "results"), group)) for group in members}
    inner = {name for group in members if scores[group] for name in _descendants(group, members)}
    groups, omissions = [], []
    for group in members:
        leaves = [name for name in _descendants(group, members) if name in tasks]
        if group in inner or not leaves:
            continue
        for key, score in scores[group].items():
            metric, _, name = key.partition(",")
            plain, by_size = _group_means(key, leaves, results)
            fits_plain, fits_size = (abs(mean - score) <= CLOSE for mean in (plain, by_size))
            if not (fits_plain or fits_size):
                reason = "a group whose score is neither the mean over items nor that over its tasks"
                omissions.append(Omission(f"{group}: {key}", 1, reason))
                continue
            groups.append(TaskGroup(group, metric, name, leaves, None if fits_plain and fits_size else fits_size))
    return groups, omissions


def _scores_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """``acc,none`` and the like of an entry of the results, without standard errors."""
    return {
        key: float(score)
        for key, score in entry.items()
        if "," in key and not key.partition(",")[0].endswith("_stderr") and isinstance(score, int | float)
    }


def _descendants(group: str, members: Mapping[str, Sequence[str]]) -> list[str]:
    """Groups and tasks below ``group``, each once."""
    found: dict[str, None] = {}
    for name in members[group]:
        found |= dict.fromkeys([name, *(_descendants(name, members) if name in members else [])])
    return list(found)


def _group_means(key: str, leaves: Sequence[str], results: Mapping[str, Any]) -> tuple[float, float]:
    """Mean of the tasks' scores, and by their sizes; NaN if the results lack one."""
    scores, sizes = _table(results, "results"), _table(results, "n-samples")
    parts = [(_table(scores, leaf).get(key), _table(sizes, leaf).get("effective")) for leaf in leaves]
    known = [(float(part), size) for part, size in parts if isinstance(part, int | float) and isinstance(size, int)]
    if len(known) < len(parts):
        return math.nan, math.nan
    by_size = sum(part * size for part, size in known) / sum(size for _, size in known)
    return sum(part for part, _ in known) / len(known), by_size


# ---------------------------------------------------------------- texts


class _TextReader:
    """Reads the texts of single rows again."""

    def __init__(self, path: Path, argument: str, places: Sequence[tuple[int, int]]):
        self._path, self._argument, self._places = path, argument, places

    def __call__(self, indices: Sequence[int]) -> list[ItemTexts]:
        texts = []
        with open_regular_file(self._path, self._argument) as file:
            for index in indices:
                offset, length = self._places[index]
                file.seek(offset)
                texts.append(_texts_of(json.loads(file.read(length))))
        return texts


def _texts_of(row: Mapping[str, Any]) -> ItemTexts:
    arguments = [part for part in (row.get("arguments") or {}).values() if isinstance(part, dict)]
    prompt = str(arguments[0].get("arg_0", "")) if arguments else ""
    responses = row.get("filtered_resps") or []
    target = str(row.get("target", ""))
    likelihoods = [_log_likelihood(response) for response in responses]
    if len(responses) > 1 and all(each is not None for each in likelihoods):
        return _texts_of_choice(prompt, target, arguments, [each for each in likelihoods if each is not None])
    if len(responses) == 1 and likelihoods[0] is not None:
        greedy = str(responses[0][1]) == "True"
        answer = "the target is the likeliest text" if greedy else "another text is likelier than the target"
        return ItemTexts(prompt, target, answer)
    answer = _text_of_response(responses[0] if responses else "")
    whole = _text_of_response(_first(row.get("resps")))
    return ItemTexts(prompt, target, answer, whole if whole != answer else "")


def _texts_of_choice(prompt: str, target: str, arguments: Sequence[Any], likelihoods: Sequence[float]) -> ItemTexts:
    choices = [str(part.get("arg_1", "")).strip() for part in arguments]
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    answer = choices[best] if best < len(choices) else str(best)
    number = int(target) if target.isdecimal() and int(target) < min(len(choices), len(likelihoods)) else None
    if number is None:
        return ItemTexts(prompt, target, answer)
    lead = likelihoods[number] - max(value for index, value in enumerate(likelihoods) if index != number)
    return ItemTexts(prompt, choices[number], answer, lead=lead)


def _log_likelihood(response: Any) -> float | None:
    """Of ``["-1.5", "False"]``, as lm-eval writes a scored continuation; None for other responses."""
    if not isinstance(response, list) or len(response) != 2 or str(response[1]) not in ("True", "False"):
        return None
    try:
        return float(response[0])
    except (TypeError, ValueError):
        return None


def _first(value: Any) -> Any:
    while isinstance(value, list) and value:
        value = value[0]
    return value


def _text_of_response(response: Any) -> str:
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
