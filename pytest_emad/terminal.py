"""The header line and the summary at the end of a run."""

from __future__ import annotations

import pytest

from pytest_emad.options import Settings
from pytest_emad.results import Results


def header(settings: Settings) -> str:
    """``emad: model …; corpus …; device …; dtype …; budget …; gate …`` and whatever else departs from the defaults."""
    parts = [
        f"model{'s' if len(settings.models) > 1 else ''} {', '.join(settings.models)}",
        f"corpus {settings.corpus or 'by model'}",
        f"device {settings.device}",
        f"dtype {settings.dtype}",
        f"budget {settings.budget.name}",
        f"gate {settings.gate}",
    ]
    if settings.backend:
        parts.append(f"backend {settings.backend}")
    if settings.require:
        parts.append(f"require {', '.join(sorted(settings.require))}")
    if settings.update_golden:
        parts.append(f"UPDATING goldens in {settings.golden}")
    return f"emad: {'; '.join(parts)}"


def write_summary(terminal: pytest.TerminalReporter, results: Results, failures: list[str], report: str | None) -> None:
    """Operating points, claims, notes and changed goldens; then what fails the run as a whole."""
    from emad_ref.report.tables import (
        claims_table,
        plain_table,
        points_table,
    )  # tabulate: not at the start of every run

    sections = (
        ("emad operating points", points_table(results.points) if results.points else ""),
        *((f"{table['model']}: {table['title']}", plain_table(table["rows"])) for table in results.tables),
        ("emad claims", claims_table(results.claims) if results.claims else ""),
        ("emad notes", "\n".join(f"- {note}" for note in results.notes)),
        ("emad goldens updated", "\n".join(f"{entry['outcome']}: {entry['id']}" for entry in results.updated)),
    )
    for title, text in sections:
        if text:
            terminal.section(title)
            terminal.line(text)
    if report is not None:
        terminal.line(f"emad: report written to {report}")
    if results.pages is not None:
        terminal.line(f"emad: beside it {results.pages}")
    for failure in failures:
        terminal.line(f"emad: FAILED: {failure}", red=True)
