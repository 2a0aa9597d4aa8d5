"""The report as one HTML file that needs nothing else: no style sheet, no script, no picture from anywhere.

``page.html`` beside this module is the Jinja2 template, ``page.css`` and ``page.js`` go into it; autoescape is on, so
that whatever came from a model, a corpus or a file name is text, and the page's policy names the one script that may
run by its hash. A cell whose text is rounded carries the value of ``report.json`` in ``<data value>``, as JSON. Jinja2
(extra ``report``) is imported when a page is made.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any
from xml.etree import ElementTree

from emad_ref.errors import EmadError
from emad_ref.report.contents import STARRED, Contents
from emad_ref.report.palette import DARK, LIGHT, variables
from emad_ref.report.passages import DIALS
from emad_ref.report.tables import plain_rows
from emad_ref.report.timings import WIDTH

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
REFERENCE = re.compile(r"url\(#([^)]+)\)")


class PageMissing(EmadError):
    """Jinja2 is not installed."""


def page(contents: Contents, remark: str = "", changes: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text of ``index.html``.

    Args:
        contents: of one run or of several.
        remark: a sentence below the title, say why there are no figures.
        changes: rows that share their keys, of what changed since a run that this one is compared with.

    Raises:
        PageMissing: the extra ``report`` is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise PageMissing(f"{error}; pip install 'pytest-emad[report]'") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["json"] = json.dumps
    environment.globals["inlined"] = lambda *arguments: Markup(inlined(*arguments))
    script = beside("page.js")
    return environment.from_string(beside("page.html")).render(
        contents=contents,
        remark=remark,
        starred=STARRED,
        changes=plain_rows(changes),
        dials=DIALS,
        strip_width=WIDTH,
        light=Markup(variables(LIGHT)),
        dark=Markup(variables(DARK)),
        css=Markup(environment.from_string(beside("page.css")).render()),
        script=Markup(script),
        digest=Markup(b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )


def beside(name: str) -> str:
    """The text of a file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def inlined(svg: str, prefix: str, label: str) -> str:
    """An SVG file as an element of a page: named for who cannot see it, its ids set apart from those of other figures.

    Args:
        svg: text of a file that ``plots`` wrote.
        prefix: before every id.
        label: what the figure shows.
    """
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(svg)
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            element.set(name, _renamed(name, value, prefix))
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _renamed(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == f"{{{XLINK}}}href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    return REFERENCE.sub(rf"url(#{prefix}-\1)", value)
