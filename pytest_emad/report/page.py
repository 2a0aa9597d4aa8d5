"""Pages of a report folder: ``report.md``, ``index.html`` and one SVG per figure, made from ``report.json`` alone.

``index.html`` needs no other file and fetches nothing. ``page.html`` beside this module is its Jinja2 template, and
``page.css`` and ``page.js`` go into it. Autoescape is on, and the page's policy names the one script that may run by
its hash. A cell whose text is rounded carries the value of ``report.json`` in ``<data value>``, as JSON. Jinja2 and
matplotlib (extra ``report``) are imported on first use; without one of them a sentence replaces its files.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from emad_ref.errors import MissingExtra, require_extra
from emad_ref.files import remove_file, write_atomically
from pytest_emad.report.contents import (
    GATE_NOTE,
    PageFigure,
    PageFigures,
    ReportContents,
    build_report_contents,
    cost_quality_rows,
)
from pytest_emad.report.depth_explorer import STOP_NUMBERS
from pytest_emad.report.figures import NOT_XML, NoDrawableRows, figure_caption, render_figure_svg
from pytest_emad.report.markdown import render_markdown_report
from pytest_emad.report.schema import Report
from pytest_emad.report.tables import to_cell_rows

if TYPE_CHECKING:
    from jinja2 import Environment

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
REFERENCE = re.compile(r"url\(#([^)]+)\)")
MARKDOWN_FILE, PAGE_FILE = "report.md", "index.html"


@dataclass(frozen=True)
class WrittenPages:
    """Names of the files written, and a sentence for each kind that is missing."""

    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        pages = [name for name in self.files if not name.endswith(".svg")]
        figures = len(self.files) - len(pages)
        parts = [f"{figures} figure{'' if figures == 1 else 's'}"] if figures else []
        later = ["`emad report` makes them from report.json later"] if self.left_out else []
        return "; ".join([", ".join(pages + parts), *self.left_out, *later])


def write_pages(reports: Sequence[Report], folder: Path, changes: Sequence[Mapping[str, Any]] = ()) -> WrittenPages:
    """Write the pages of ``reports`` into ``folder``, which exists; each file whole or not at all.

    Removes a page of an earlier run if this run cannot make it.

    Args:
        changes: rows of the section on what changed since an earlier report, as ``comparison.changed_rows`` returns.

    Raises:
        BadFile: the folder cannot be written to.
    """
    figures, remark = render_figures_and_remark(reports)
    contents = build_report_contents(reports, figures)
    svg_by_file = {figure.file: figure.svg for run in figures for figure in run.values() if figure.file}
    texts = svg_by_file | {MARKDOWN_FILE: render_markdown_report(contents, remark)}
    left_out = [remark] if remark else []
    try:
        texts[PAGE_FILE] = render_html_page(contents, remark, changes)
    except MissingExtra as missing:
        remove_file(folder / PAGE_FILE, "report")
        left_out.append(f"no {PAGE_FILE}: {missing}")
    for name, text in texts.items():
        write_atomically(folder / name, NOT_XML.sub("\ufffd", text))
    return WrittenPages(tuple(texts), tuple(left_out))


def render_figures_and_remark(reports: Sequence[Report]) -> tuple[PageFigures, str]:
    """The figures of all tables and of each model's cost and quality; a sentence if matplotlib is missing, else ""."""
    used_names: set[str] = set()
    figures: list[dict[int | str, PageFigure]] = [{} for _ in reports]
    try:
        for run, report in zip(figures, reports, strict=True):
            for model in (str(model["name"]) for model in report["models"]):
                if rows := cost_quality_rows(report, model):
                    run[model] = _draw("cost against quality", rows, f"{model}: cost against quality")
            for number, table in enumerate(report["tables"]):
                if "figure" in table:
                    file = _free_name(table["model"], table["figure"], used_names)
                    run[number] = _draw(table["figure"], table["rows"], f"{table['model']}: {table['title']}", file)
                    used_names.add(run[number].file)
    except MissingExtra as missing:
        return [{} for _ in reports], f"no figures: {missing}"
    return figures, ""


def _draw(figure: str, rows: Sequence[Mapping[str, Any]], heading: str, file: str = "") -> PageFigure:
    try:
        return PageFigure(heading, file, render_figure_svg(figure, rows, heading), caption=figure_caption(figure, rows))
    except NoDrawableRows as nothing:
        return PageFigure(heading, absent=str(nothing))


def _free_name(model: str, figure: str, used_names: set[str]) -> str:
    """``model-figure.svg``, or the first of ``model-figure-2.svg``, … that is free."""
    stem = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") or "model" for part in (model, figure))
    names = (f"{stem}.svg" if number == 1 else f"{stem}-{number}.svg" for number in count(1))
    return next(name for name in names if name not in used_names)


def render_html_page(contents: ReportContents, remark: str = "", changes: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text of ``index.html``.

    Args:
        remark: a sentence below the title.
        changes: as in ``write_pages``.

    Raises:
        MissingExtra: the extra ``report`` is not installed.
    """
    environment = make_page_environment()
    from markupsafe import Markup

    environment.globals["inlined"] = lambda *arguments: Markup(inline_svg(*arguments))
    script = read_package_text("page.js")
    return environment.from_string(read_package_text("page.html")).render(
        contents=contents,
        remark=remark,
        starred=GATE_NOTE,
        changes=to_cell_rows(changes),
        dials=STOP_NUMBERS,
        css=Markup(read_package_text("page.css")),
        script=Markup(script),
        digest=Markup(b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )


def make_page_environment() -> Environment:
    """The environment of a page's template: text is escaped, and a name that is not there is an error.

    Raises:
        MissingExtra: the extra ``report`` is not installed.
    """
    require_extra("an HTML page", "jinja2")
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["json"] = json.dumps
    return environment


def read_package_text(name: str) -> str:
    """The text of a file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """An SVG file's text as an element of a page, with ``label`` for screen readers and ``prefix`` before every id."""
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
