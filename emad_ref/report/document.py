"""The report as a Markdown document: what ``contents`` lists, with the legs of every claim after the claims.

Whatever came from a model, a corpus or a file name is text here and stays text: no markup of Markdown or HTML in it
survives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

from emad_ref.report.contents import STARRED, Contents, Figure, Run, Table
from emad_ref.report.tables import Row

ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
INLINE = re.compile(r"([\\`*_\[\]|~$#])")
OPENING = re.compile(r"^(\d*)([+=.)-])")  # begins a list or underlines a heading where it begins a line
LINES = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def document(contents: Contents, remark: str = "") -> str:
    """The text of ``report.md``.

    Args:
        contents: of one run or of several.
        remark: a sentence below the title, say why there are no figures.
    """
    parts = [f"# {escaped(contents.title)}", paragraph(remark), "## Verdicts", _table(contents.counts)]
    parts.append(_table(contents.overview))
    for run in contents.runs:
        parts += _run(run)
    return "\n\n".join(part for part in parts if part) + "\n"


def _run(run: Run) -> list[str]:
    return [
        f"## {escaped(run.name)}",
        *_section("Claims", _table([entry.row for entry in run.claims]), escaped(STARRED) if run.claims else ""),
        *_section("Legs", *(part for entry in run.claims for part in _legs(entry.name, entry.title, entry.legs))),
        *_section("Operating points", _table(run.points)),
        *_section("Tables", *(part for table in run.tables for part in _recorded(table))),
        *_section("Notes", "\n".join(f"- {paragraph(note)}" for note in run.notes)),
        *_section("Goldens", _table(run.goldens)),
        *_section("Models", _table(run.models)),
        *_section("Settings", _table(run.settings)),
        *_section("Provenance", _table(run.provenance)),
    ]


def _section(heading: str, *parts: str) -> list[str]:
    """A heading and what stands under it; nothing where that is empty."""
    return [f"### {heading}", *parts] if any(parts) else []


def _legs(name: str, title: str, rows: list[Row]) -> list[str]:
    return [f"#### {escaped(name)}", paragraph(title), _table(rows)] if rows else []


def _recorded(table: Table) -> list[str]:
    return [f"#### {escaped(table.heading)}", _figure(table.heading, table.figure), _table(table.rows)]


def _figure(heading: str, figure: Figure | None) -> str:
    if figure is None:
        return ""
    return f"![{escaped(heading)}]({figure.file})" if figure.file else f"No figure: {escaped(figure.absent)}"


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    text = [{escaped(key): escaped(cell.text) for key, cell in row.items()} for row in rows]
    table: str = tabulate(text, headers="keys", tablefmt="pipe", disable_numparse=True)
    return table


def escaped(text: str) -> str:
    """``text`` such that Markdown shows it as it stands within a line; its line breaks become ``<br>``."""
    return "<br>".join(_escaped_line(line) for line in LINES.split(text))


def paragraph(text: str) -> str:
    """``escaped`` where ``text`` begins a line."""
    return OPENING.sub(r"\1\\\2", escaped(text))


def _escaped_line(line: str) -> str:
    for letter, entity in ENTITIES.items():
        line = line.replace(letter, entity)
    return INLINE.sub(r"\\\1", line.strip())
