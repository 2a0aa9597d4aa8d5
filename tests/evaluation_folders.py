"""Finished evaluations as files: what lm-eval 0.4.13, inspect_ai 0.3.285 and a table write, with chosen scores.

The rows have the keys and forms of files that these tools wrote; ``tests/unit/accuracy/test_real_lm_eval.py`` holds the
lm-eval rows against a run of lm-eval itself.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

DATE, LATER = "2026-11-30T10-00-00.000001", "2026-11-30T11-00-00.000001"
LETTERS = "ABCD"


def hashed(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def choice_row(number: int, scores: Mapping[str, Any], *, document: str = "", filter: str = "none") -> dict[str, Any]:
    """Return a row of a multiple-choice document; it is answered by B, the target, if its first score is 1."""
    text = document or f"Question {number}: which letter?"
    right = next(iter(scores.values()), 0) == 1
    likelihoods = [-3.0, -1.0 if right else -2.5, -2.0, -4.0]
    return {
        "doc_id": number,
        "doc": {"question": text, "paragraph": number // 4},
        "target": "1",
        "arguments": {f"gen_args_{n}": {"arg_0": text, "arg_1": f" {letter}"} for n, letter in enumerate(LETTERS)},
        "resps": [[[str(each), "False"]] for each in likelihoods],
        "filtered_resps": [[str(each), "False"] for each in likelihoods],
        "filter": filter,
        "metrics": list(scores),
        "doc_hash": hashed(text),
        "prompt_hash": hashed(f"prompt {text}"),
        "target_hash": hashed("1"),
        **scores,
    }


def generated_row(number: int, scores: Mapping[str, Any], *, filter: str, repeats: int = 1) -> dict[str, Any]:
    """Return a row of a document with generated answers; several repeats lie inside ``resps`` under one score."""
    answer = "14" if next(iter(scores.values())) == 1 else "15"
    whole = f"It is {answer}."
    return choice_row(number, scores, filter=filter) | {
        "target": "14",
        "arguments": {"gen_args_0": {"arg_0": f"Sum {number}?", "arg_1": {"until": ["."], "max_gen_toks": 8}}},
        "resps": [[whole] * repeats],
        "filtered_resps": [answer],
        "target_hash": hashed("14"),
    }


def write_lm_eval(
    folder: Path,
    tasks: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    model: str = "model",
    date: str = DATE,
    groups: Mapping[str, Sequence[str]] | None = None,
    by_size: bool = True,
    directions: Mapping[str, Mapping[str, bool]] | None = None,
) -> Path:
    """Write ``folder/model/samples_TASK_DATE.jsonl`` and the results; ``groups`` aggregate acc over their tasks."""
    below = folder / model
    below.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"results": {}, "n-samples": {}, "higher_is_better": {}, "group_subtasks": {}}
    for task, rows in tasks.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (below / f"samples_{task}_{date}.jsonl").write_text(text, encoding="utf-8")
        filters = {row["filter"] for row in rows}
        documents = len(rows) // max(len(filters), 1)
        metrics = list(rows[0]["metrics"]) if rows else []
        entry: dict[str, Any] = {"alias": task}
        for name in metrics:
            for each in filters:
                values = [row[name] for row in rows if row["filter"] == each and name in row]
                if all(isinstance(value, int | float) for value in values):
                    entry |= {f"{name},{each}": float(np.mean(values)), f"{name}_stderr,{each}": "N/A"}
        results["results"][task] = entry
        results["n-samples"][task] = {"original": documents, "effective": documents}
        results["higher_is_better"][task] = dict.fromkeys(metrics, True) | dict((directions or {}).get(task, {}))
    for group, members in (groups or {}).items():
        leaves = [leaf for member in members for leaf in (groups or {}).get(member, [member])]
        scores = [results["results"][leaf]["acc,none"] for leaf in leaves]
        sizes = [results["n-samples"][leaf]["effective"] if by_size else 1 for leaf in leaves]
        results["results"][group] = {"alias": group, "acc,none": float(np.average(scores, weights=sizes))}
        results["group_subtasks"][group] = list(members)
    named = {"model_name": model, "lm_eval_version": "0.4.13"}
    (below / f"results_{date}.json").write_text(json.dumps(results | named, indent=2), encoding="utf-8")
    return folder


def paired_rights(
    n: int, lost: int, gained: int, *, right: float = 0.6, seed: int = 0
) -> tuple[list[float], list[float]]:
    """Return scores of two sides of n items, of which so many are lost and gained."""
    rng = np.random.default_rng(seed)
    base = (rng.random(n) < right).astype(float)
    base[:lost], base[lost : lost + gained] = 1.0, 0.0
    candidate = base.copy()
    candidate[:lost], candidate[lost : lost + gained] = 0.0, 1.0
    order = rng.permutation(n)
    return base[order].tolist(), candidate[order].tolist()


def write_choice_pair(
    folder: Path, n: int = 400, lost: int = 0, gained: int = 0, *, task: str = "letters", seed: int = 0
) -> tuple[Path, Path]:
    """Write two evaluations of one multiple-choice task."""
    sides = paired_rights(n, lost, gained, seed=seed)
    paths = []
    for name, date, scores in zip(("base", "candidate"), (DATE, LATER), sides, strict=True):
        rows = [choice_row(number, {"acc": score}) for number, score in enumerate(scores)]
        paths.append(write_lm_eval(folder / name, {task: rows}, model=f"{name}-model", date=date))
    return paths[0], paths[1]


def samples_file(folder: Path, task: str = "letters") -> Path:
    """Return the file of samples of a task below ``folder``."""
    (found,) = folder.glob(f"*/samples_{task}_*.jsonl")
    return found


def inspect_sample(number: int, value: Any, *, epoch: int = 1, scorer: str = "match") -> dict[str, Any]:
    """Return a sample of inspect_ai; ``value`` as a scorer gives it."""
    return {
        "id": f"s{number}",
        "epoch": epoch,
        "input": f"What is {number} + 1?",
        "target": str(number + 1),
        "metadata": {"page": number // 2},
        "scores": {scorer: {"value": value, "answer": f"answer {value}", "explanation": "", "history": []}},
    }


def inspect_header(
    samples: int, *, task: str = "sums", model: str = "mock/model", run: str = "run-a"
) -> dict[str, Any]:
    return {
        "version": 2,
        "status": "success",
        "eval": {"eval_id": run, "created": "2026-11-30T20:46:38+00:00", "task": task, "model": model},
        "results": {"total_samples": samples, "completed_samples": samples},
    }


def write_inspect_json(path: Path, samples: Sequence[Mapping[str, Any]], **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(inspect_header(len(samples), **header) | {"samples": list(samples)}), encoding="utf-8")
    return path


def write_inspect_eval(
    path: Path, samples: Sequence[Mapping[str, Any]], *, compression: int = zipfile.ZIP_DEFLATED, **header: Any
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("summaries.json", json.dumps(list(samples)))
        archive.writestr("header.json", json.dumps(inspect_header(len(samples), **header)))
    return path


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a .jsonl or, by the name's ending, a .csv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        names = list(rows[0])
        text = "\n".join([",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]) + "\n"
    path.write_text(text, encoding="utf-8")
    return path
