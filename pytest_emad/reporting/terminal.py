"""What a run prints of ours: the header, a line as each claim is decided, the summary at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from emad_ref.errors import printable
from emad_ref.verdict.gating import UNDECIDED
from pytest_emad.options import Settings
from pytest_emad.recording import EmadWarning

LONGEST_REASON = 300  # characters of a waiver in the header; report.json keeps the whole
OUTSIDE = 4  # lines that pytest itself prints around a summary, of the forty: headings, a blank, its last line
COLOURS: dict[str, dict[str, bool]] = {"good": {"green": True}, "bad": {"red": True}, "open": {"yellow": True}}
TONES = (("falsified", "bad"), ("inconclusive", "open"), ("survived", "good"))  # the worst first


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
    waived = [f"emad: waived {of}: {printable(reason, LONGEST_REASON)}" for of, reason in settings.waive]
    return [printable(line) for line in (f"emad: {'; '.join(parts)}", f"emad: decoder: {decoder}", *waived)]


def write_summary(
    terminal: pytest.TerminalReporter, report: Mapping[str, Any], places: Sequence[str], verbosity: int
) -> None:
    """The summary of at most forty lines; before it, with ``-v``, every row, and with ``-vv`` legs and tables too.

    Args:
        report: as ``report.json`` holds it.
        places: where it lies, a sentence each.
    """
    from emad_ref.console import take_any_text
    from emad_ref.report.brief import brief  # tabulate: not at the start of every run
    from emad_ref.report.brieftext import MOST, lines

    take_any_text(terminal.config.get_terminal_writer()._file)
    width = terminal.config.get_terminal_writer().fullwidth
    for title, text in _at_length(report, width, verbosity):
        terminal.section(title)
        terminal.line(printable(text))
    found = lines(brief(report), width, places, MOST - OUTSIDE)
    if report["claims"]:
        terminal.section(f"emad: {', '.join(report['settings']['models'])}")
    for line in found:
        terminal.line(printable(line.text), **COLOURS.get(line.tone, {}))


def _at_length(report: Mapping[str, Any], width: int, verbosity: int) -> Iterator[tuple[str, str]]:
    """(title, text) of what does not go into the summary."""
    from emad_ref.report.fitting import text_table
    from emad_ref.report.tables import leg_rows, noted, sections

    updated = [entry for entry in report["goldens"] if entry["outcome"] in ("added", "changed")]
    if updated:  # who asks for an update reads what it did
        yield "emad goldens updated", "\n".join(f"{entry['outcome']}: {entry['id']}" for entry in updated)
    if verbosity < 1:
        return
    tables = report["tables"] if verbosity > 1 else []
    yield from sections(report["points"], tables, report["claims"], report["notes"], width)
    for claim in report["claims"] if verbosity > 1 else []:
        if claim["legs"]:
            yield f"{claim['id']} on {claim['model']}", text_table(leg_rows(claim["legs"]), width)
    if report["run"]["failures"]:
        yield "emad: why the run fails", "\n".join(noted(reason, width) for reason in report["run"]["failures"])


def leave_out_repeated(terminal: pytest.TerminalReporter) -> None:
    """Warnings of ours that the summary says in a line of its own; ``-v`` shows them with their places."""
    warnings = terminal.stats.pop("warnings", [])
    others = [warning for warning in warnings if f"{EmadWarning.__name__}: " not in warning.message]
    if others:
        terminal.stats["warnings"] = others


def decided(claims: Sequence[Mapping[str, Any]], width: int) -> str:
    """What a test decided, a line per claim of at most ``width`` letters: id, verdict, what was found. "" for nothing.

    Claims whose premise or instrument is absent decided nothing: a dot says enough.
    """
    from emad_ref.verdict.numbers import quantity

    lines = [
        f"  {claim['id']:15}  {claim['verdict']:12}  "
        + quantity(claim["estimate"], claim["unit"], claim["interval"])
        + (f" ({claim['model']})" if " + " in claim["model"] else "")
        for claim in claims
        if claim["verdict"] not in UNDECIDED
    ]
    return "\n".join(printable(line) if len(line) <= width else f"{printable(line[: width - 1])}…" for line in lines)


def colour(claims: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """That of the worst verdict among ``claims``."""
    found = {claim["verdict"] for claim in claims}
    return next((COLOURS[tone] for verdict, tone in TONES if verdict in found), {})
