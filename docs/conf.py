"""The site: pages in Markdown as they stand, formulas as MathML, nothing fetched when a page is read."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

project = "pytest-emad"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_math_renderer = "mathml"


def inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """A formula that cannot be converted ends the build."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
