"""Generated parts of ``reference.md``: exported names, hook, fixtures, options and commands, from their docstrings.

A line ``<!-- generated: PART -->`` of the page is replaced by the text of ``PARTS[PART]()``.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emad_ref
import pytest_emad
from pytest_emad.cli import build_parser
from pytest_emad.run import fixtures
from pytest_emad.run.option_table import OPTIONS

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def exports() -> str:
    """An autodoc directive for each name that the reference and the judge export."""
    return "\n\n".join(
        _autodoc(package.__name__, name, getattr(package, name))
        for package in (emad_ref, pytest_emad)
        for name in package.__all__
        if name != "__version__"
    )


def _autodoc(package: str, name: str, value: Any) -> str:
    kind = "autoclass" if inspect.isclass(value) else "autofunction"
    members = "\n   :members:" if kind == "autoclass" else ""
    return f"### `{name}`\n\n```{{eval-rst}}\n.. {kind}:: {package}.{name}{members}\n```"


def hooks() -> str:
    """An autodoc directive for the hook."""
    return "```{eval-rst}\n.. autofunction:: pytest_emad.hookspecs.pytest_emad_make_decoder\n```"


def fixture_list() -> str:
    """Each fixture with its scope and docstring, read from the source."""
    lines = []
    for node in ast.parse(Path(inspect.getfile(fixtures)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("emad_"):
            scope = "session" if "session" in ast.unparse(node.decorator_list[0]) else "function"
            lines.append(f"- `{node.name}` ({scope}): {' '.join((ast.get_docstring(node) or '').split())}")
    return "\n".join(lines)


def options() -> str:
    """A table of the plugin's options."""
    rows = [f"| `{option.flag}` | `{option.ini}` | {_cell(option.help)} |" for option in OPTIONS]
    return "\n".join(["| option | ini setting | meaning |", "|---|---|---|", *rows])


def commands() -> str:
    """The help of ``emad`` and of each of its verbs."""
    top = build_parser()
    verbs = next(action for action in top._actions if action.dest == "verb")
    parsers = {f"emad {verb}": below for verb, below in verbs.choices.items()}
    return "\n\n".join(
        f"### `{name}`\n\n```text\n{below.format_help().rstrip()}\n```" for name, below in parsers.items()
    )


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")


PARTS: dict[str, Callable[[], str]] = {
    "exports": exports,
    "hooks": hooks,
    "fixtures": fixture_list,
    "options": options,
    "commands": commands,
}


def filled(page: str) -> str:
    """``page`` with its generated parts."""
    return MARK.sub(lambda found: PARTS[found[1]](), page)
