"""The report folder as people read it: ``report.md``, ``index.html`` and one SVG per figure, from reports as data.

Neither a model nor torch is needed: everything is drawn from rows that ``report.json`` holds, in the run that wrote it
or any time later (``emad report``). What an extra is missing for is left out, and the text says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref.files import remove, write_atomically
from emad_ref.report.contents import Figure, Figures, contents
from emad_ref.report.document import document
from emad_ref.report.page import PageMissing, page
from emad_ref.report.plots import NOT_XML, NothingToDraw, PlotsMissing, draw
from emad_ref.report.reading import Report

DOCUMENT, PAGE = "report.md", "index.html"


@dataclass(frozen=True)
class Written:
    """Names of the files written, and a sentence for each kind that could not be."""

    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        pages = [name for name in self.files if not name.endswith(".svg")]
        figures = len(self.files) - len(pages)
        drawn = [f"{figures} figure{'' if figures == 1 else 's'}"] if figures else []
        later = ["`emad report` makes them from report.json later"] if self.left_out else []
        return "; ".join([", ".join(pages + drawn), *self.left_out, *later])


def write_pages(reports: Sequence[Report], folder: Path, changes: Sequence[Mapping[str, Any]] = ()) -> Written:
    """Write everything that shows ``reports`` into ``folder``, which exists; each file whole or not at all.

    A page that cannot be made leaves none behind: one of an earlier run would tell of another report.

    Args:
        changes: rows for the page's section on what changed, as of ``page.page``.

    Raises:
        BadFile: the folder cannot be written to.
    """
    figures, remark = draw_figures(reports)
    laid_out = contents(reports, figures)
    drawn = {figure.file: figure.svg for run in figures for figure in run.values() if figure.file}
    texts = drawn | {DOCUMENT: document(laid_out, remark)}
    left_out = [remark] if remark else []
    try:
        texts[PAGE] = page(laid_out, remark, changes)
    except PageMissing as missing:
        remove(folder / PAGE, "report")
        left_out.append(f"no {PAGE}: {missing}")
    for name, text in texts.items():
        write_atomically(folder / name, NOT_XML.sub("\ufffd", text))
    return Written(tuple(texts), tuple(left_out))


def draw_figures(reports: Sequence[Report]) -> tuple[Figures, str]:
    """Every figure that a table asks for, and a sentence where none can be drawn for want of matplotlib, else ""."""
    taken: set[str] = set()
    figures: list[dict[int, Figure]] = [{} for _ in reports]
    for run, report in enumerate(reports):
        for number, table in enumerate(report["tables"]):
            if "figure" not in table:
                continue
            try:
                svg = draw(table["figure"], table["rows"], f"{table['model']}: {table['title']}")
            except NothingToDraw as nothing:
                figures[run][number] = Figure(absent=str(nothing))
            except PlotsMissing as missing:
                return [{} for _ in reports], f"no figures: {missing}"
            else:
                name = next(name for name in _names(table["model"], table["figure"]) if name not in taken)
                taken.add(name)
                figures[run][number] = Figure(name, svg)
    return figures, ""


def _names(model: str, figure: str) -> Iterator[str]:
    """``model-figure.svg``, then with numbers: a model may have several tables for one figure."""
    stem = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") or "model" for part in (model, figure))
    yield f"{stem}.svg"
    for number in range(2, 1_000_000):
        yield f"{stem}-{number}.svg"
