"""The site: pages in Markdown as they stand, formulas as MathML, nothing fetched when a page is read."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util.logging import getLogger

project = "pytest-emad"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_math_renderer = "mathml"


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
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
