"""The summary as Markdown, for a page that shows what a job of continuous integration found."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from emad_ref.report.brief import Brief, Gate
from emad_ref.report.brieftext import MOST, counted, lines
from emad_ref.report.document import escaped

WIDE = 10_000  # letters in a line: paragraphs wrap by themselves
HEAD = 6  # lines around the table of gates: heading, blanks, its own head


def job_summary(brief: Brief, places: Sequence[str] = ()) -> str:
    """At most forty lines: the gates as a table, the rest as the terminal has it, a list item per line.

    Args:
        places: where the report lies, a sentence each.
    """
    parts = [f"## emad: {escaped(brief.models)}" + (f", {counted(brief.gates)}" if brief.gates else "")]
    if brief.gates:
        rows = [_row(gate) for gate in brief.gates]
        parts.append(tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True))
    rest = lines(brief.without_gates(), WIDE, places, MOST - HEAD - len(brief.gates))
    parts.append("\n".join(f"{_item(line.text)}{escaped(line.text.strip())}" for line in rest))
    return "\n\n".join(part for part in parts if part) + "\n"


def _item(text: str) -> str:
    return "  - " if text.startswith("  ") else "- "


def _row(gate: Gate) -> dict[str, str]:
    claim = f"{gate.id} ({gate.of})" if gate.of else gate.id
    told = {"gate": claim, "verdict": gate.verdict, "asks": gate.title, "found": "; ".join(filter(None, gate.told))}
    return {key: escaped(text) for key, text in told.items()}
