"""The report as a Markdown document: what ``contents`` lists, with the legs of every claim after the claims.

Whatever came from a model, a corpus or a file name is text here and stays text: no markup of Markdown or HTML in it
survives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

from emad_ref.report.contents import GATE_NOTE, PageFigure, PageRun, PageTable, ReportContents
from emad_ref.report.tables import Row

ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
INLINE = re.compile(r"([\\`*_\[\]|~$#])")
LINE_MARKER = re.compile(r"^(\d*)([+=.)-])")  # begins a list or underlines a heading where it begins a line
LINE_BREAKS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def markdown_document(contents: ReportContents, remark: str = "") -> str:
    """The text of ``report.md``.

    Args:
        contents: of one run or of several.
        remark: a sentence below the title, say why there are no figures.
    """
    parts = [f"# {escape_markdown(contents.title)}", markdown_paragraph(remark), "## Verdicts", _table(contents.counts)]
    parts.append(_table(contents.overview))
    for run in contents.runs:
        parts += _run_sections(run)
    return "\n\n".join(part for part in parts if part) + "\n"


def _run_sections(run: PageRun) -> list[str]:
    return [
        f"## {escape_markdown(run.name)}",
        *_section(
            "Claims", _table([entry.row for entry in run.claims]), escape_markdown(GATE_NOTE) if run.claims else ""
        ),
        *_section(
            "Legs", *(part for entry in run.claims for part in _leg_section(entry.name, entry.title, entry.legs))
        ),
        *_section("Operating points", _table(run.points)),
        *_section("Tables", *(part for table in run.tables for part in _table_section(table))),
        *_section("Notes", "\n".join(f"- {markdown_paragraph(note)}" for note in run.notes)),
        *_section("Goldens", _table(run.goldens)),
        *_section("Models", _table(run.models)),
        *_section("Settings", _table(run.settings)),
        *_section("Provenance", _table(run.provenance)),
    ]


def _section(heading: str, *parts: str) -> list[str]:
    """A heading and what stands under it; nothing where that is empty."""
    return [f"### {heading}", *parts] if any(parts) else []


def _leg_section(name: str, title: str, rows: list[Row]) -> list[str]:
    return [f"#### {escape_markdown(name)}", markdown_paragraph(title), _table(rows)] if rows else []


def _table_section(table: PageTable) -> list[str]:
    return [f"#### {escape_markdown(table.heading)}", _figure_line(table.heading, table.figure), _table(table.rows)]


def _figure_line(heading: str, figure: PageFigure | None) -> str:
    if figure is None:
        return ""
    return (
        f"![{escape_markdown(heading)}]({figure.file})"
        if figure.file
        else f"No figure: {escape_markdown(figure.absent)}"
    )


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    text = [{escape_markdown(key): escape_markdown(cell.text) for key, cell in row.items()} for row in rows]
    table: str = tabulate(text, headers="keys", tablefmt="pipe", disable_numparse=True)
    return table


def escape_markdown(text: str) -> str:
    """``text`` such that Markdown shows it as it stands within a line; its line breaks become ``<br>``."""
    return "<br>".join(_escape_line(line) for line in LINE_BREAKS.split(text))


def markdown_paragraph(text: str) -> str:
    """``escape_markdown`` where ``text`` begins a line."""
    return LINE_MARKER.sub(r"\1\\\2", escape_markdown(text))


def _escape_line(line: str) -> str:
    for letter, entity in ENTITIES.items():
        line = line.replace(letter, entity)
    return INLINE.sub(r"\\\1", line.strip())
