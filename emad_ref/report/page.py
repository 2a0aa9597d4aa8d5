"""Colours of the page, light and dark: pairs of letters and ground, whose contrast a test holds to WCAG's AA.

``SHADES`` of depth run from shallow to deep; ``SERIES`` are lines in drawings. Nothing is told by colour alone.

The report as one HTML file that needs nothing else: no style sheet, no script, no picture from anywhere.

``page.html`` beside this module is the Jinja2 template, ``page.css`` and ``page.js`` go into it; autoescape is on, so
that whatever came from a model, a corpus or a file name is text, and the page's policy names the one script that may
run by its hash. A cell whose text is rounded carries the value of ``report.json`` in ``<data value>``, as JSON. Jinja2
(extra ``report``) is imported when a page is made.

The report folder as people read it: ``report.md``, ``index.html`` and one SVG per figure, from reports as data.

Neither a model nor torch is needed: everything is drawn from rows that ``report.json`` holds, in the run that wrote it
or any time later (``emad report``). What an extra is missing for is left out, and the text says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

from emad_ref.errors import EmadError
from emad_ref.files import remove_file, write_atomically
from emad_ref.report.contents import GATE_NOTE, STRIP_WIDTH, PageFigure, PageFigures, ReportContents, report_contents
from emad_ref.report.depth_explorer import STOP_NUMBERS
from emad_ref.report.figures import NOT_XML, NothingToDraw, PlotsMissing, draw_figure
from emad_ref.report.markdown import markdown_document
from emad_ref.report.schema import Report
from emad_ref.report.tables import plain_rows

LIGHT_COLORS: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#ffffff",
        "panel": "#f3f5f7",
        "ink": "#1a1d21",
        "muted": "#525a63",
        "line": "#7d8690",
        "accent": "#0b57a4",
        "good": "#e2f3e6",
        "good-ink": "#1d5c31",
        "shade-0": "#dfecfa",
        "shade-0-ink": "#1a1d21",
        "shade-1": "#bfd8f3",
        "shade-1-ink": "#1a1d21",
        "shade-2": "#8fbae6",
        "shade-2-ink": "#1a1d21",
        "shade-3": "#2f6ba6",
        "shade-3-ink": "#ffffff",
        "shade-4": "#123f70",
        "shade-4-ink": "#ffffff",
        "series-0": "#0b57a4",
        "series-1": "#b3541e",
        "series-2": "#2e7d32",
        "series-3": "#7b3fa0",
        "series-4": "#a61e4d",
        "series-5": "#00707a",
        "series-6": "#6b5900",
        "series-7": "#555b61",
        "series-8": "#8f3b76",
        "series-9": "#3d5a00",
    }
)
DARK_COLORS: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#14171a",
        "panel": "#1e2328",
        "ink": "#e8eaed",
        "muted": "#a9b1ba",
        "line": "#737d88",
        "accent": "#7db7f0",
        "good": "#17301f",
        "good-ink": "#8fd6a3",
        "shade-0": "#1d2732",
        "shade-0-ink": "#e8eaed",
        "shade-1": "#22405f",
        "shade-1-ink": "#e8eaed",
        "shade-2": "#2f5f92",
        "shade-2-ink": "#ffffff",
        "shade-3": "#6fa8de",
        "shade-3-ink": "#14171a",
        "shade-4": "#b9dafa",
        "shade-4-ink": "#14171a",
        "series-0": "#7db7f0",
        "series-1": "#f0a06b",
        "series-2": "#7fcf85",
        "series-3": "#c9a0ea",
        "series-4": "#f08bab",
        "series-5": "#5fc7d1",
        "series-6": "#d6bf52",
        "series-7": "#b6bcc3",
        "series-8": "#e296cc",
        "series-9": "#b2d16b",
    }
)


def css_variables(palette: Mapping[str, str]) -> str:
    """CSS custom properties."""
    return "; ".join(f"--{name}: {colour}" for name, colour in palette.items())


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
REFERENCE = re.compile(r"url\(#([^)]+)\)")


class PageMissing(EmadError):
    """Jinja2 is not installed."""


def page(contents: ReportContents, remark: str = "", changes: Sequence[Mapping[str, Any]] = ()) -> str:
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
    environment.globals["inlined"] = lambda *arguments: Markup(inline_svg(*arguments))
    script = package_text("page.js")
    return environment.from_string(package_text("page.html")).render(
        contents=contents,
        remark=remark,
        starred=GATE_NOTE,
        changes=plain_rows(changes),
        dials=STOP_NUMBERS,
        strip_width=STRIP_WIDTH,
        light=Markup(css_variables(LIGHT_COLORS)),
        dark=Markup(css_variables(DARK_COLORS)),
        css=Markup(environment.from_string(package_text("page.css")).render()),
        script=Markup(script),
        digest=Markup(b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )


def package_text(name: str) -> str:
    """The text of a file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def inline_svg(svg: str, prefix: str, label: str) -> str:
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
            element.set(name, _prefix_id(name, value, prefix))
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _prefix_id(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == f"{{{XLINK}}}href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    return REFERENCE.sub(rf"url(#{prefix}-\1)", value)


MARKDOWN_FILE, PAGE_FILE = "report.md", "index.html"


@dataclass(frozen=True)
class WrittenPages:
    """Names of the files written, and a sentence for each kind that could not be."""

    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        pages = [name for name in self.files if not name.endswith(".svg")]
        figures = len(self.files) - len(pages)
        drawn = [f"{figures} figure{'' if figures == 1 else 's'}"] if figures else []
        later = ["`emad report` makes them from report.json later"] if self.left_out else []
        return "; ".join([", ".join(pages + drawn), *self.left_out, *later])


def write_pages(reports: Sequence[Report], folder: Path, changes: Sequence[Mapping[str, Any]] = ()) -> WrittenPages:
    """Write everything that shows ``reports`` into ``folder``, which exists; each file whole or not at all.

    A page that cannot be made leaves none behind: one of an earlier run would tell of another report.

    Args:
        changes: rows for the page's section on what changed, as of ``page.page``.

    Raises:
        BadFile: the folder cannot be written to.
    """
    figures, remark = draw_figures(reports)
    laid_out = report_contents(reports, figures)
    drawn = {figure.file: figure.svg for run in figures for figure in run.values() if figure.file}
    texts = drawn | {MARKDOWN_FILE: markdown_document(laid_out, remark)}
    left_out = [remark] if remark else []
    try:
        texts[PAGE_FILE] = page(laid_out, remark, changes)
    except PageMissing as missing:
        remove_file(folder / PAGE_FILE, "report")
        left_out.append(f"no {PAGE_FILE}: {missing}")
    for name, text in texts.items():
        write_atomically(folder / name, NOT_XML.sub("\ufffd", text))
    return WrittenPages(tuple(texts), tuple(left_out))


def draw_figures(reports: Sequence[Report]) -> tuple[PageFigures, str]:
    """Every figure that a table asks for, and a sentence where none can be drawn for want of matplotlib, else ""."""
    taken: set[str] = set()
    figures: list[dict[int, PageFigure]] = [{} for _ in reports]
    for run, report in enumerate(reports):
        for number, table in enumerate(report["tables"]):
            if "figure" not in table:
                continue
            try:
                svg = draw_figure(table["figure"], table["rows"], f"{table['model']}: {table['title']}")
            except NothingToDraw as nothing:
                figures[run][number] = PageFigure(absent=str(nothing))
            except PlotsMissing as missing:
                return [{} for _ in reports], f"no figures: {missing}"
            else:
                name = next(name for name in _svg_names(table["model"], table["figure"]) if name not in taken)
                taken.add(name)
                figures[run][number] = PageFigure(name, svg)
    return figures, ""


def _svg_names(model: str, figure: str) -> Iterator[str]:
    """``model-figure.svg``, then with numbers: a model may have several tables for one figure."""
    stem = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") or "model" for part in (model, figure))
    yield f"{stem}.svg"
    for number in range(2, 1_000_000):
        yield f"{stem}-{number}.svg"
