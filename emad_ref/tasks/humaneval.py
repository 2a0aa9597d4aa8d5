"""HumanEval: does the function a model wrote pass the task's own asserts? (Chen et al. 2021; EMAD's code completion.)

One greedy completion per task, cut at the first of ``STOPS``; then

    prompt + completion

is a program that ``sandbox.check_program`` runs in one process, and

    prompt + test + check(entry_point)

its check, in another one, where ``entry_point`` calls the program. The task is solved if and only if the check runs to
its last line, and pass@1 is the share of tasks solved.

The tasks come from a folder that holds ``HumanEval.jsonl`` or ``HumanEval.jsonl.gz``. This module generates nothing,
downloads nothing, and does not ask whether code may be executed: its caller does, before calling ``judged``.
"""

from __future__ import annotations

import ast
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from emad_ref.errors import BadArgument
from emad_ref.files import parsed_json, read_bytes
from emad_ref.tasks.sandbox import Result, Task, check_program

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # what follows a function at the margin is not part of it
ENDED: dict[str, str] = {  # outcomes that are no wrong answer: what a sentence says of such programs
    "timeout": "ran out of time",
    "memory": "ran out of memory",
    "killed": "ended by a signal",
}
NAMES = ("HumanEval.jsonl", "HumanEval.jsonl.gz")


@dataclass(frozen=True)
class Problem:
    """One line of the file. ``test`` defines ``check(candidate)``; ``entry_point`` names the candidate."""

    task_id: str
    prompt: str
    canonical_solution: str
    test: str
    entry_point: str


def problems_in(folder: Path) -> list[Problem]:
    """The tasks, in the file's order.

    Raises:
        BadArgument: no such file, not gzip or not UTF-8, no tasks, or a line (named by its number) that is no task.
    """
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if not found:
        raise BadArgument("folder", str(folder), f"a folder that holds {' or '.join(NAMES)}", "put the file there")
    path = found[0]
    problems: dict[str, Problem] = {}
    # not splitlines(): JSON may hold U+2028 and its like inside a string
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if line.strip():
            place = f"{path.name}, line {number}"
            problem = problem_of(line, place)
            if problem.task_id in problems:
                raise BadArgument(place, problem.task_id, "a task_id that no line before it has", "remove one of them")
            problems[problem.task_id] = problem
    if not problems:
        raise BadArgument("folder", str(path), "a file of at least one task", "it holds none: fetch it again")
    return list(problems.values())


def text_of(path: Path) -> str:
    try:
        content = read_bytes(path, "folder")
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise BadArgument("folder", str(path), "whole, in UTF-8", f"fetch it again ({error})") from error


def problem_of(line: str, place: str) -> Problem:
    names = [field.name for field in fields(Problem)]
    try:
        row = parsed_json(line)
        values = [row[name] for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise BadArgument(place, line[:60], f"a JSON object with {', '.join(names)}", "mend the line") from error
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise BadArgument(f"{place}, {name}", value, "a string", "mend the line")
    problem = Problem(*values)
    if not problem.entry_point.isidentifier():
        raise BadArgument(f"{place}, entry_point", problem.entry_point, "the name of a function", "mend the line")
    return problem


def truncated(completion: str) -> str:
    """``completion`` up to the first stop sequence. A stop that would begin in the prompt is none."""
    return completion[: min(at for stop in STOPS if (at := (completion + stop).find(stop)) >= 0)]


def program_of(problem: Problem, completion: str) -> str:
    """The program that is judged; ``completion`` as generated, it is cut here."""
    return f"{problem.prompt}{truncated(completion)}\n"


def task_of(problem: Problem) -> Task:
    """The check. It may use the helpers that the prompt defines, as the prompt defines them."""
    definitions = problem.prompt
    try:
        ast.parse(definitions)
    except SyntaxError:  # a prompt that ends at a colon: its function has no docstring
        definitions += problem.canonical_solution
    return Task(problem.entry_point, definitions, f"{problem.test}\ncheck({problem.entry_point})\n")


def judged(problems: Sequence[Problem], completions: Sequence[str], *, seconds: float = 5.0) -> list[Result]:
    """Run one completion per problem, in their order; solved where ``outcome`` is ``passed``.

    Raises:
        BadArgument: not one completion per problem.
        SandboxUnavailable: nothing is executed where it cannot be confined.
    """
    if len(problems) != len(completions):
        raise BadArgument("completions", len(completions), f"one for each of {len(problems)} problems")
    pairs = zip(problems, completions, strict=True)
    return [check_program(task_of(problem), program_of(problem, given), seconds=seconds) for problem, given in pairs]


def pass_at_1(results: Sequence[Result]) -> float:
    """Share of ``results`` that passed; with one greedy completion per task there is nothing to average over.

    Raises:
        BadArgument: no results; no share of nothing is 0.
    """
    if not results:
        raise BadArgument("results", results, "at least one")
    return sum(result.outcome == "passed" for result in results) / len(results)
