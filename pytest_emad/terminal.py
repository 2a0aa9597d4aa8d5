"""The header line and the summary at the end of a run."""

from __future__ import annotations

import pytest

from emad_ref.verdict.known import summary
from pytest_emad.options import Settings
from pytest_emad.results import Results


def header(settings: Settings, decoder: str) -> list[str]:
    """``emad: model …; corpus …; device …; dtype …; budget …; gate …`` and whatever else departs from the defaults.

    Then whose decoder is about to be judged, and what may stay undecided.
    """
    parts = [
        f"model{'s' if len(settings.models) > 1 else ''} {', '.join(settings.models)}",
        f"corpus {settings.study.corpus or 'by model'}",
        f"device {settings.study.device}",
        f"dtype {settings.study.dtype}",
        f"budget {settings.budget.name}",
        f"gate {settings.gating.gate}",
    ]
    if settings.study.seed:
        parts.append(f"seed {settings.study.seed}")
    if settings.backend:
        parts.append(f"backend {settings.backend}")
    if settings.decoder:
        parts.append(f"decoder {settings.decoder}")
    if settings.gating.require:
        parts.append(f"require {', '.join(sorted(settings.gating.require))}")
    if settings.update_golden:
        parts.append(f"UPDATING goldens in {settings.golden}")
    waived = [f"emad: waived {of}: {reason}" for of, reason in settings.waive]
    return [f"emad: {'; '.join(parts)}", f"emad: decoder: {decoder}", *waived]


def write_summary(
    terminal: pytest.TerminalReporter, results: Results, settings: Settings, failures: list[str], last: list[str]
) -> None:
    """Operating points, claims, notes, what the record says and what changed in it; then what fails the whole run.

    ``last``: lines about the run itself, before what fails it.
    """
    from emad_ref.report.tables import sections  # tabulate: not at the start of every run

    updated = "\n".join(f"{entry['outcome']}: {entry['id']}" for entry in results.updated)
    against_record = settings.gating.gate == "known" and not settings.update_golden and results.known
    known = summary(results.known) if against_record else ""
    shown = sections(results.points, results.tables, results.claims, results.notes)
    for title, text in [*shown, ("emad known verdicts", known), ("emad goldens updated", updated)]:
        if not text:
            continue
        terminal.section(title)
        terminal.line(text)
    for line in last:
        terminal.line(f"emad: {line}")
    for failure in failures:
        terminal.line(f"emad: FAILED: {failure}", red=True)
