"""HumanEval is read, cut and scored the published way; a program counts only if it ran to its last assert."""

from __future__ import annotations

import gzip
import json

import pytest

from emad_ref.errors import BadArgument
from emad_ref.tasks import humaneval
from emad_ref.tasks.humaneval import Problem, judged, pass_at_1, problems_in, program_of, truncated
from emad_ref.tasks.sandbox import Result, availability

ADD = Problem(
    task_id="HumanEval/0",
    prompt='def add(a: int, b: int) -> int:\n    """Sum of both.\u2028\n    >>> add(1, 2)\n    3\n    """\n',
    canonical_solution="    return a + b\n",
    test="\n\nMETA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert not candidate(0, 0)\n",
    entry_point="add",
)
TWICE = Problem(
    task_id="HumanEval/1",
    prompt='from typing import List\n\n\ndef twice(items: List[int]) -> List[int]:\n    """All of it twice."""\n',
    canonical_solution="    return items * 2\n",
    test="def check(candidate):\n    assert candidate([1]) == [1, 1]\n",
    entry_point="twice",
)


def lines_of(*problems):
    return "".join(json.dumps(vars(problem), ensure_ascii=False) + "\n" for problem in problems)


@pytest.mark.parametrize(
    ("name", "written"),
    [("HumanEval.jsonl", str.encode), ("HumanEval.jsonl.gz", lambda text: gzip.compress(text.encode()))],
)
def test_tasks_are_read_plain_or_compressed_in_their_order(tmp_path, name, written):
    (tmp_path / name).write_bytes(written(lines_of(TWICE, ADD) + "\n"))
    assert problems_in(tmp_path) == [TWICE, ADD]


def without(name):
    return json.dumps({key: value for key, value in vars(TWICE).items() if key != name})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"HumanEval\.jsonl, line 2='\{', but expected a JSON object with task_id, prompt,"),
        ("[]", r"HumanEval\.jsonl, line 2="),
        ("3", r"HumanEval\.jsonl, line 2="),
        (without("test"), r"HumanEval\.jsonl, line 2="),
        (json.dumps(vars(TWICE) | {"prompt": 3}), r"line 2, prompt=3, but expected a string"),
        (json.dumps(vars(TWICE) | {"entry_point": "f();g"}), r"line 2, entry_point='f\(\);g'"),
        (lines_of(ADD), r"line 2='HumanEval/0', but expected a task_id that no line before it has"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, said):
    (tmp_path / "HumanEval.jsonl").write_text(lines_of(ADD) + line)
    with pytest.raises(BadArgument, match=said):
        problems_in(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("HumanEval.jsonl", b"", "at least one task"),
        ("HumanEval.jsonl", b"\xff\xfe", "UTF-8"),
        ("HumanEval.jsonl.gz", b"not gzip", "fetch it again"),
        ("HumanEval.jsonl.gz", gzip.compress(lines_of(ADD).encode())[:-20], "fetch it again"),
        ("other.jsonl", b"{}", "a folder that holds HumanEval.jsonl or HumanEval.jsonl.gz"),
    ],
)
def test_a_file_that_is_absent_or_broken_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadArgument, match=said):
        problems_in(tmp_path)


@pytest.mark.parametrize("stop", ["\nclass", "\ndef", "\n#", "\nif", "\nprint"])
def test_a_completion_is_cut_at_what_follows_the_function(stop):
    assert truncated(f"    return 1\n{stop} more\n{stop}") == "    return 1\n"


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "    return 1\n",
        "    if a:\n        print(1)  # one\n    return a\n",
        "def at_the_start(): ...",
        "\nclas",
        "\n",
    ],
)
def test_a_completion_without_a_stop_stays_whole(completion):
    assert truncated(completion) == completion


def test_the_earliest_of_several_stops_cuts():
    assert truncated("    return 1\nprint(2)\n# three\ndef four(): ...") == "    return 1"


def test_the_program_is_prompt_completion_test_and_the_call_of_check():
    assert program_of(TWICE, TWICE.canonical_solution + "\nprint(twice([1]))") == (
        TWICE.prompt + TWICE.canonical_solution + "\n" + TWICE.test + "\ncheck(twice)\n"
    )


def test_right_wrong_and_evasive_completions_are_told_apart():
    if reason := availability():
        pytest.skip(reason)
    completions = {
        ADD.canonical_solution: "passed",
        ADD.canonical_solution + "\nprint(add(1, 2))\nraise ValueError": "passed",  # cut before it runs
        "    return a - b\n": "failed",
        "    return a +\n": "failed",
        "    raise SystemExit\n": "failed",
        "    import os; os._exit(0)\n": "failed",
        "": "failed",
    }
    results = judged([ADD] * len(completions), list(completions), seconds=10.0)
    assert [result.outcome for result in results] == list(completions.values())
    assert pass_at_1(results) == 2 / 7


def test_an_endless_completion_is_stopped_when_its_seconds_are_over():
    if reason := availability():
        pytest.skip(reason)
    assert [result.outcome for result in judged([ADD], ["    while True: pass\n"], seconds=0.7)] == ["timeout"]


def test_each_completion_meets_its_own_problem():
    if reason := availability():
        pytest.skip(reason)
    problems = [ADD, TWICE]
    assert pass_at_1(judged(problems, [p.canonical_solution for p in problems])) == 1.0
    assert pass_at_1(judged(problems, [p.canonical_solution for p in reversed(problems)])) == 0.0


def test_a_number_of_completions_that_does_not_fit_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(humaneval, "run_program", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(BadArgument, match="completions=1, but expected one for each of 2 problems"):
        judged([ADD, TWICE], [""])


def test_pass_at_1_is_the_share_that_passed_and_of_nothing_it_is_refused():
    results = [Result(outcome, "", "", 1) for outcome in ("passed", "failed", "timeout", "memory", "killed", "passed")]
    assert pass_at_1(results) == pytest.approx(1 / 3)  # exact but for the rounding of 2/6
    with pytest.raises(BadArgument, match="at least one"):
        pass_at_1([])
