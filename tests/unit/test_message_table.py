"""The page of messages: each part of a message in its table is still printed by the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "command-line.md"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def printed_texts() -> Iterator[str]:
    """The text constants of the package, f-strings with a gap for each value, without docstrings."""
    for package in ("emad_ref", "pytest_emad"):
        for file in (ROOT / package).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
                    yield node.value


@pytest.mark.skipif(not PAGE.is_file(), reason="docs/ is not part of an installed package")
def test_each_message_of_the_page_is_in_the_code() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Messages, and what to do")[2]
    parts = ROW.findall(table)
    assert len(parts) > 15
    texts = "\n".join(printed_texts())
    # argparse's own, which pytest and the verbs print
    assert [part for part in parts if part not in texts and part != "unrecognized arguments: "] == []
