"""The site: Markdown pages, formulas as MathML, ``reference.md`` filled from docstrings; no page fetches anything."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util.logging import getLogger

project = "pytest-emad"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_math_renderer = "mathml"


sys.path.insert(0, str(Path(__file__).parent))


def fill_reference(app: Any, docname: str, source: list[str]) -> None:
    """Replace the marks of ``reference.md`` by generated text."""
    if docname == "reference":
        from api import filled  # it imports torch

        source[0] = filled(source[0])


LITERAL = re.compile(r"^( {2,}|\S.*\S {2,}\S)")  # lines that are aligned by hand


def keep_columns(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Set blocks of a docstring that are aligned by hand as they stand."""
    blocks = "\n".join(lines).split("\n\n")
    kept = [_literal(block) if _is_aligned(block) else block for block in blocks]
    lines[:] = "\n\n".join(kept).split("\n")


def _is_aligned(block: str) -> bool:
    return not block.lstrip().startswith((":", "..", ">>>")) and any(LITERAL.match(line) for line in block.splitlines())


def _literal(block: str) -> str:
    return "::\n\n" + "\n".join(f"   {line}" for line in block.splitlines())


def mathml(node: nodes.Element, display: str) -> str:
    """Warns of a command that the converter does not know and leaves as it stands: a strict build ends there."""
    converted: str = convert(node.astext(), display=display)
    if "\\" in converted:
        getLogger(__name__).warning("formula with a command that is not converted: %s", node.astext(), location=node)
    return converted


def inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(mathml(node, "inline"))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(mathml(node, "block"))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.connect("source-read", fill_reference)
    app.connect("autodoc-process-docstring", keep_columns, priority=900)  # after napoleon
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
