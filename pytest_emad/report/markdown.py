"""``report.md``: the contents of a report as Markdown: verdict, gates, claims with their legs, tables.

Names of models, corpora and files are escaped: no Markdown or HTML in them takes effect.
"""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from pytest_emad.report.contents import GATE_NOTE, PageFigure, PageRun, ReportContents
from pytest_emad.report.tables import Cell, Row, escape_markdown, escape_markdown_paragraph


def render_markdown_report(contents: ReportContents, remark: str = "") -> str:
    """The text of ``report.md``; ``remark``: a sentence below the title."""
    parts = [
        f"# {escape_markdown(contents.title)}",
        "\n".join(f"{_name(run, contents)}{escape_markdown(run.overview['headline'])}" for run in contents.runs),
        escape_markdown_paragraph(remark),
        "## Verdicts",
        _table(contents.counts),
    ]
    parts.append(_table(contents.overview))
    for run in contents.runs:
        parts += _run_sections(run)
    return "\n\n".join(part for part in parts if part) + "\n"


def _name(run: PageRun, contents: ReportContents) -> str:
    """The beginning of a list item that names one of several runs."""
    return f"- {escape_markdown(run.name)}: " if len(contents.runs) > 1 else ""


def _run_sections(run: PageRun) -> list[str]:
    legs = [
        part
        for entry in run.claims
        if entry.legs
        for part in (f"#### {escape_markdown(entry.name)}", escape_markdown_paragraph(entry.title), _table(entry.legs))
    ]
    tables = [
        part
        for heading, rows, figure in run.tables
        for part in (f"#### {escape_markdown(heading)}", _figure_line(heading, figure), _table(rows))
    ]
    gates = [
        {key: Cell(gate[key]) for key in ("id", "title", "model", "verdict", "found")} for gate in run.overview["gates"]
    ]
    sections = {
        "Gates": [_table(gates)],
        "Claims": [_table([entry.row for entry in run.claims]), escape_markdown(GATE_NOTE) if run.claims else ""],
        "Legs": legs,
        "Operating points": [_table(run.points)],
        "Lost answers": [_table(run.lost_answers)],
        "Tables": tables,
        "Notes": ["\n".join(f"- {escape_markdown_paragraph(note)}" for note in run.notes)],
        "Goldens": [_table(run.goldens)],
        "Models": [_table(run.models)],
        "Settings": [_table(run.settings)],
        "Provenance": [_table(run.provenance)],
    }
    lines = [part for heading, parts in sections.items() if any(parts) for part in (f"### {heading}", *parts)]
    broken = "\n".join(f"- {escape_markdown(cause)}" for cause in run.overview["broken"])
    return [f"## {escape_markdown(run.name)}", broken, *lines]


def _figure_line(heading: str, figure: PageFigure | None) -> str:
    if figure is None:
        return ""
    if figure.file:
        return f"![{escape_markdown(heading)}]({figure.file})"
    return f"No figure: {escape_markdown(figure.absent)}"


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    text = [{escape_markdown(key): escape_markdown(cell.text) for key, cell in row.items()} for row in rows]
    table: str = tabulate(text, headers="keys", tablefmt="pipe", disable_numparse=True)
    return table
