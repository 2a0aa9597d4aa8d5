"""Reads logs of inspect_ai (0.3): ``.eval``, a zip file, and ``.json``.

A log has one task and one model. Each sample has an id, an epoch and scores by scorer; epochs of one sample depend on
each other. ``C``, ``I``, ``P`` and ``N`` count as inspect_ai counts them: 1, 0, ½, 0. A scorer with several values is
one metric per value, ``scorer/name``; a list is no number and is left out by name.

Of an ``.eval`` file only ``header.json`` and ``summaries.json`` are read, where inspect_ai keeps the first 5,120
characters of a text. A changed prompt is thus seen within these. inspect_ai compresses with Zstandard, which Python's
``zipfile`` reads from 3.14 on; before, the package ``zstandard`` does.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref.errors import require_extra
from emad_ref.files import BadFile, is_file, open_regular_file
from pytest_emad.accuracy.items import (
    Evaluation,
    ItemTexts,
    Omission,
    ScoreColumns,
    ScoredTask,
    choose_latest_by_task,
    require_distinct_ids,
    require_some_items,
)

AGAIN = "write the log again, or finish it with inspect eval-retry"
KEPT = 5_120  # characters of a text in a summary
ZSTANDARD = 93  # compression method of a zip entry
HEAD_BYTES = 4_096  # of a .json file, in which a log names its evaluation
LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


@dataclass(frozen=True)
class InspectLog:
    """A log: its header and its samples, or their summaries."""

    path: Path
    header: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]

    @property
    def task(self) -> str:
        return str(self.header["eval"]["task"])

    @property
    def created(self) -> str:
        return str(self.header["eval"].get("created", ""))


def is_inspect_log(path: Path) -> bool:
    """Whether a file's name, and for ``.json`` its beginning, are those of a log."""
    if not is_file(path):
        return False
    if path.suffix != ".json":
        return path.suffix == ".eval"
    with open_regular_file(path, "log") as file:
        head = file.read(HEAD_BYTES)
    return b'"eval"' in head and b'"status"' in head


def read_inspect_logs(paths: Sequence[Path], path: Path, argument: str, cluster: str = "") -> Evaluation:
    """The evaluation in ``paths``; of several logs of one task the latest counts.

    Args:
        path: as the user named it.
        argument: the name of the argument for messages.
        cluster: a field of ``metadata``: samples with one value of it depend on each other.

    Raises:
        BadFile: a damaged or unfinished log, logs of several models, no score with a number per sample.
    """
    logs = [_read_log(each, argument) for each in paths]
    latest, omissions, notes = choose_latest_by_task(
        ((log.task, log) for log in logs), lambda log: log.created, lambda log: log.path, "log", "logs"
    )
    models = sorted({str(log.header["eval"].get("model", "")) for log in latest.values()})
    if len(models) > 1:
        raise BadFile(argument, path, "logs of one model", f"it holds {', '.join(models)}", "name the logs of one")
    tasks = []
    for log in latest.values():
        task, left_out = _read_task(log, argument, cluster)
        tasks.append(task)
        omissions += left_out
    run = ",".join(sorted(str(log.header["eval"].get("eval_id", "")) for log in latest.values()))
    return Evaluation(path, "inspect_ai", models[0], run.strip(","), tasks, (), omissions, notes)


def _read_log(path: Path, argument: str) -> InspectLog:
    if path.suffix == ".eval":
        with _open_archive(path, argument) as archive:
            entries = ("header.json", "summaries.json")
            header, samples = (_read_entry(archive, path, name, argument) for name in entries)
    else:
        with open_regular_file(path, argument) as file:
            header = _parse(file.read(), path, "", argument)
        samples = header.get("samples") if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(header.get("eval"), dict) or "task" not in header["eval"]:
        raise BadFile(argument, path, "a log of inspect_ai", "its header names no task", AGAIN)
    if header.get("status") != "success":
        reason = f"its status is {header.get('status')!r}"
        raise BadFile(argument, path, "a finished log of inspect_ai", reason, AGAIN)
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, dict) for sample in samples):
        reason = "it has no samples"
        raise BadFile(argument, path, "a log with its samples", reason, "evaluate without --no-log-samples")
    total = (header.get("results") or {}).get("total_samples")
    if isinstance(total, int) and len(samples) < total:
        reason = f"it has {len(samples):,} of {total:,} samples"
        raise BadFile(argument, path, "every sample of the evaluation", reason, AGAIN)
    return InspectLog(path, header, samples)


def _open_archive(path: Path, argument: str) -> zipfile.ZipFile:
    with open_regular_file(path, argument):
        pass
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        reason = f"no whole zip file: {error}"
        raise BadFile(argument, path, "an .eval log of inspect_ai", reason, AGAIN) from error


def _read_entry(archive: zipfile.ZipFile, path: Path, name: str, argument: str) -> Any:
    try:
        entry = archive.getinfo(name)
    except KeyError as error:
        reason = f"it has no {name}: the evaluation did not finish"
        raise BadFile(argument, path, "a finished .eval log", reason, AGAIN) from error
    try:
        data = archive.read(entry)
    except NotImplementedError as error:
        data = _decompress(entry, path, argument, error)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise BadFile(argument, path, "a readable .eval log", f"{name}: {error}", AGAIN) from error
    return _parse(data, path, name, argument)


def _decompress(entry: zipfile.ZipInfo, path: Path, argument: str, error: Exception) -> bytes:
    """The content of an entry in Zstandard."""
    if entry.compress_type != ZSTANDARD:
        reason = f"{entry.filename} is compressed by method {entry.compress_type}"
        raise BadFile(argument, path, "a readable .eval log", reason, "inspect log convert --to json") from error
    require_extra(f"{argument}={str(path)!r}", "zstandard", alternative="inspect log convert --to json")
    import zstandard

    with open_regular_file(path, argument) as file:
        file.seek(entry.header_offset)
        head = file.read(30)
        name_bytes, extra_bytes = struct.unpack("<HH", head[26:30])
        file.seek(name_bytes + extra_bytes, 1)
        packed = file.read(entry.compress_size)
    try:
        data: bytes = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    except zstandard.ZstdError as fault:
        raise BadFile(argument, path, "a readable .eval log", f"{entry.filename}: {fault}", AGAIN) from fault
    if len(data) != entry.file_size:
        reason = f"{entry.filename} has {len(data):,} of {entry.file_size:,} bytes"
        raise BadFile(argument, path, "a readable .eval log", reason, AGAIN)
    return data


def _parse(data: bytes, path: Path, name: str, argument: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = f"{name + ': ' if name else ''}no JSON: {error}"
        raise BadFile(argument, path, "a readable log of inspect_ai", reason, AGAIN) from error


# ---------------------------------------------------------------- scores


def _read_task(log: InspectLog, argument: str, cluster: str) -> tuple[ScoredTask, list[Omission]]:
    columns = ScoreColumns(argument, log.path, log.task)
    ids, prompts, targets, clusters, failed = [], [], [], [], 0
    for sample in log.samples:
        if not sample.get("scores"):
            failed += 1
            continue
        columns.add_row(_iterate_scores(sample["scores"]))
        epoch = sample.get("epoch", 1)
        ids.append(f"{sample.get('id')}" if epoch == 1 else f"{sample.get('id')}, epoch {epoch}")
        prompts.append(_hash(_texts_of_input(sample.get("input"))))
        targets.append(_hash(_texts_of_input(sample.get("target"))))
        clusters.append(_cluster_of(sample, cluster, log.path, argument) if cluster else str(sample.get("id")))
    require_some_items(argument, log.path, len(ids))
    require_distinct_ids(argument, log.path, log.task, ids)
    scores, omissions = columns.finish(lambda metric: True)
    if failed:
        omissions.append(Omission(f"{log.task}: samples", failed, "ended in an error and have no score"))
    scored = [sample for sample in log.samples if sample.get("scores")]

    def read_texts(indices: Sequence[int]) -> list[ItemTexts]:
        return [_texts_of(scored[index]) for index in indices]

    task = ScoredTask(log.task, "", ids, [""] * len(ids), prompts, targets, clusters, scores, log.path, read_texts)
    return task, omissions


def _iterate_scores(scores: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(Metric, number) of each scorer; values that are no number stay as they are."""
    for scorer, score in scores.items():
        value = score.get("value") if isinstance(score, dict) else score
        if isinstance(value, dict):
            for name, part in value.items():
                yield f"{scorer}/{name}", _to_number(part)
        else:
            yield scorer, _to_number(value)


def _to_number(value: Any) -> Any:
    """``value`` as inspect_ai's default ``value_to_float`` counts it; other texts stay."""
    if not isinstance(value, str):
        return value
    if value in LETTERS:
        return LETTERS[value]
    if value.lower() in WORDS:
        return WORDS[value.lower()]
    try:
        return float(value)
    except ValueError:
        return value


def _cluster_of(sample: Mapping[str, Any], cluster: str, path: Path, argument: str) -> str:
    metadata = sample.get("metadata") or {}
    if cluster not in metadata:
        reason = f"sample {sample.get('id')} has no {cluster!r} in its metadata, but {', '.join(metadata) or 'nothing'}"
        remedy = "name a field that it has"
        raise BadFile(argument, path, "the field of --cluster in every sample", reason, remedy)
    return json.dumps(metadata[cluster], sort_keys=True)


# ---------------------------------------------------------------- texts


def _texts_of_input(value: Any) -> list[str]:
    """The texts of an input or target: a string, a list of strings, or messages with their roles."""
    if isinstance(value, list):
        return [text for part in value for text in _texts_of_input(part)]
    if isinstance(value, dict):
        content = value.get("content", value.get("text", ""))
        return [str(value.get("role", "")), *_texts_of_input(content)]
    return [] if value is None else [str(value)[:KEPT]]


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _texts_of(sample: Mapping[str, Any]) -> ItemTexts:
    prompt = "\n".join(text for text in _texts_of_input(sample.get("input")) if text)
    target = ", ".join(_texts_of_input(sample.get("target")))
    answers = [
        str(score["answer"])
        for score in sample["scores"].values()
        if isinstance(score, dict) and score.get("answer") is not None
    ]
    return ItemTexts(prompt, target, answers[0] if answers else "")
