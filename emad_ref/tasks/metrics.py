"""Scores of tasks that lm-eval lacks or cannot load offline: a document and its results → one number per metric.

SQuAD v1.1 (Rajpurkar et al. 2016): exact match and token F1 of normalised texts, the best over all reference answers.
SamSum (Gliwa et al. 2019): ROUGE F-measures in 0–1, Porter-stemmed, from the package rouge-score. HumanEval (Chen et
al. 2021): one greedy completion per task, cut at the first of ``STOPS``; the program runs in one sandboxed process and
the task's own check in another (``sandbox.check_program``). Functions of lm-eval's shape: ``f(doc, results)``.
"""

from __future__ import annotations

import ast
import gzip
import re
import string
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument
from emad_ref.files import parse_json, read_bytes
from emad_ref.tasks.sandbox import FunctionTask, SandboxResult, check_program
from emad_ref.tasks.scoring import passes_asserts
from emad_ref.text.documents import Example

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # what follows a function at the margin is not part of it
ENDING_TEXT: dict[str, str] = {  # outcomes that are no wrong answer: what a sentence says of such programs
    "timeout": "ran out of time",
    "memory": "ran out of memory",
    "killed": "ended by a signal",
}
HUMANEVAL_FILES = ("HumanEval.jsonl", "HumanEval.jsonl.gz")


@dataclass(frozen=True)
class HumanEvalProblem:
    """One line of the file. ``test`` defines ``check(candidate)``; ``entry_point`` names the candidate."""

    task_id: str
    prompt: str
    canonical_solution: str
    test: str
    entry_point: str


def problems_in(folder: Path) -> list[HumanEvalProblem]:
    """The tasks, in the file's order.

    Raises:
        BadArgument: no such file, not gzip or not UTF-8, no tasks, or a line (named by its number) that is no task.
    """
    found = [folder / name for name in HUMANEVAL_FILES if (folder / name).is_file()]
    if not found:
        raise BadArgument(
            "folder", str(folder), f"a folder that holds {' or '.join(HUMANEVAL_FILES)}", "put the file there"
        )
    path = found[0]
    problems: dict[str, HumanEvalProblem] = {}
    # not splitlines(): JSON may hold U+2028 and its like inside a string
    for number, line in enumerate(_file_text(path).split("\n"), start=1):
        if line.strip():
            place = f"{path.name}, line {number}"
            problem = _parse_problem(line, place)
            if problem.task_id in problems:
                raise BadArgument(place, problem.task_id, "a task_id that no line before it has", "remove one of them")
            problems[problem.task_id] = problem
    if not problems:
        raise BadArgument("folder", str(path), "a file of at least one task", "it holds none: fetch it again")
    return list(problems.values())


def _file_text(path: Path) -> str:
    try:
        content = read_bytes(path, "folder")
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise BadArgument("folder", str(path), "whole, in UTF-8", f"fetch it again ({error})") from error


def _parse_problem(line: str, place: str) -> HumanEvalProblem:
    names = [field.name for field in fields(HumanEvalProblem)]
    try:
        row = parse_json(line)
        values = [row[name] for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise BadArgument(place, line[:60], f"a JSON object with {', '.join(names)}", "mend the line") from error
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise BadArgument(f"{place}, {name}", value, "a string", "mend the line")
    problem = HumanEvalProblem(*values)
    if not problem.entry_point.isidentifier():
        raise BadArgument(f"{place}, entry_point", problem.entry_point, "the name of a function", "mend the line")
    return problem


def truncate_completion(completion: str) -> str:
    """``completion`` up to the first stop sequence. A stop that would begin in the prompt is none."""
    return completion[: min(at for stop in STOPS if (at := (completion + stop).find(stop)) >= 0)]


def completion_program(problem: HumanEvalProblem, completion: str) -> str:
    """The program that is judged; ``completion`` as generated, it is cut here."""
    return f"{problem.prompt}{truncate_completion(completion)}\n"


def completion_check(problem: HumanEvalProblem) -> FunctionTask:
    """The check. It may use the helpers that the prompt defines, as the prompt defines them."""
    definitions = problem.prompt
    try:
        ast.parse(definitions)
    except SyntaxError:  # a prompt that ends at a colon: its function has no docstring
        definitions += problem.canonical_solution
    return FunctionTask(problem.entry_point, definitions, f"{problem.test}\ncheck({problem.entry_point})\n")


def run_completions(
    problems: Sequence[HumanEvalProblem], completions: Sequence[str], *, seconds: float = 5.0
) -> list[SandboxResult]:
    """Run one completion per problem, in their order; solved where ``outcome`` is ``passed``.

    Raises:
        BadArgument: not one completion per problem.
        SandboxUnavailable: nothing is executed where it cannot be confined.
    """
    if len(problems) != len(completions):
        raise BadArgument("completions", len(completions), f"one for each of {len(problems)} problems")
    pairs = zip(problems, completions, strict=True)
    return [
        check_program(completion_check(problem), completion_program(problem, given), seconds=seconds)
        for problem, given in pairs
    ]


def pass_at_1(results: Sequence[SandboxResult]) -> float:
    """Share of ``results`` that passed; with one greedy completion per task there is nothing to average over.

    Raises:
        BadArgument: no results; no share of nothing is 0.
    """
    if not results:
        raise BadArgument("results", results, "at least one")
    return sum(result.outcome == "passed" for result in results) / len(results)


TaskRow = dict[str, Any]
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def squad_results(doc: TaskRow, results: Sequence[str]) -> dict[str, float]:
    """``exact`` and ``f1``, the best over the reference answers."""
    answers = doc["answers"]["text"]
    return {
        "exact": max(float(normalize_answer(results[0]) == normalize_answer(answer)) for answer in answers),
        "f1": max(token_f1(results[0], answer) for answer in answers),
    }


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces, in this order."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the multiset of normalised words; two empty texts agree."""
    mine, theirs = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    shared = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * shared / (len(mine) + len(theirs))


def samsum_results(doc: TaskRow, results: Sequence[str]) -> dict[str, float]:
    """``rouge1`` and ``rougeL``."""
    scores = _rouge().score(doc["summary"], results[0])
    return {name: float(score.fmeasure) for name, score in scores.items()}


@cache
def _rouge() -> Any:
    rouge = import_module("rouge_score.rouge_scorer")  # comes with lm-eval; without types
    return rouge.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)


def with_boxed_answers(rows: Any) -> Any:
    """MATH documents with the answer their solution boxes: lm-eval's function, which cannot take an empty part."""
    from lm_eval.tasks.hendrycks_math.utils import process_docs

    return process_docs(rows) if len(rows) else rows


def world_code_results(doc: TaskRow, results: Sequence[str]) -> dict[str, float]:
    """Whether the generated line makes a function that passes its asserts; decided without running it."""
    example = Example("code", doc["prompt"], doc["answer"], "runs", check=doc["check"])
    return {"acc": float(passes_asserts(example, results[0]))}


def humaneval_results(doc: TaskRow, results: Sequence[str]) -> dict[str, float]:
    """``pass@1`` of one completion, run in the sandbox, and whether it was ended there, for want of time or memory.

    Raises:
        SandboxUnavailable: nothing is executed where it cannot be confined.
    """
    problem = HumanEvalProblem(**{name.name: doc[name.name] for name in fields(HumanEvalProblem)})
    (result,) = run_completions([problem], [results[0]])
    return {"pass@1": pass_at_1([result])} | {how: float(result.outcome == how) for how in ENDING_TEXT}
