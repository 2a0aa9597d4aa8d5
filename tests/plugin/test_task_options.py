"""Which published tasks to score, how many documents of each, and whether generated programs may run."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_emad.options import settings
from tests.plugin.conftest import Run

ASKED: list[tuple[str, str, Any, Any]] = [  # option, what is written, what is read, what is read where it is left out
    ("tasks", "wikitext, gsm8k", frozenset({"wikitext", "gsm8k"}), frozenset()),
    ("limit", "50", 50, None),
]


def parsed(project: pytest.Pytester, *arguments: str) -> Any:
    return settings(project.parseconfig("-p", "no:cacheprovider", *arguments))


@pytest.mark.parametrize(("name", "written", "read", "default"), ASKED, ids=[row[0] for row in ASKED])
def test_from_the_command_line_and_from_ini(
    project: pytest.Pytester, name: str, written: str, read: Any, default: Any
) -> None:
    assert getattr(parsed(project).study, name) == default
    assert getattr(parsed(project, f"--emad-{name}", written).study, name) == read
    project.makeini(f"[pytest]\nemad_{name} = {written}\n")
    assert getattr(parsed(project).study, name) == read


def test_programs_run_only_where_it_is_said(project: pytest.Pytester) -> None:
    assert parsed(project).study.allow_code_execution is False
    assert parsed(project, "--emad-allow-code-execution").study.allow_code_execution is True
    project.makeini("[pytest]\nemad_allow_code_execution = true\n")
    assert parsed(project).study.allow_code_execution is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--emad-tasks", " , "], "--emad-tasks=' , ', but expected a comma list of task names"),
        (["--emad-limit", "0"], "--emad-limit='0', but expected a whole number ≥ 1"),
        (["--emad-limit", "all"], "--emad-limit='all', but expected a whole number ≥ 1"),
        (["-o", "emad_allow_code_execution=perhaps"], "ini emad_allow_code_execution='perhaps', but expected true"),
    ],
)
def test_bad_values_are_usage_errors(run: Run, arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in "\n".join(result.errlines + result.outlines)
