"""``report.json``: one object per run, written and read in one form.

    state       ``running`` | ``complete`` | ``interrupted`` | ``usage error``
    run         {"started" UTC, "duration_s", "command", "addopts" of the environment, "exit_status", "failures" of the
                run as a whole, "asked": the selected shipped tests, "partial": the part that the user typed, or "",
                "earlier": how often the folder's earlier reports ran the same tests, options, weights and project,
                "claims_file" with its hash, "project" with its root and commit, "replay": {"folder", "arguments" that
                decide a test, "left_out", "environment"}}
    decoder     {"name", "foreign", "providers": [provider with its counts], "overlooked": [provider not loaded]}; a
                server has "requests", "retries" with "retry_reasons" where some were sent again, and "served": what it
                says of its model
    settings    {option: value}; "known_gaps" as {test: reason}   provenance  {versions, commit, platform, device, …}
    models      [{"name", facts …}]                        goldens     [{"id", "outcome"}]
    points      [{"name", "digest", …}], see ``tables.operating_point_rows``   notes       [sentence]
    claims      [``Verdict.to_json()``] with "title": the claim in plain words; "test": the node id of the test that
                gave it; "gate": whether it gates; "fails": whether gate and options make it fail that test. May say
                "refused": why the decoder, not the model or the text, left the claim undecided. "deciding": index in
                "legs", or null; "point" (a digest), "kind" and "on" of a leg: what it is about
    tables      [{"title", "model", "rows": [{column: value}], "figure"?: its name in ``figures.FIGURES``}]
    tests       [{"nodeid", "shipped" name or null, "outcome", "kind", "reason", "duration_s"}] as pytest reported;
                "claim" of a test of one;
                "known_gap": the name by which ``settings.known_gaps`` lists one that failed as expected;
                "crash": "file:line" where a failed one raised;
                "attempts": [{"outcome", "reason"}] as each one ended, whatever a mark, hook or plugin made of it;
                "shown": how many tables, points and notes the first attempt recorded; "features": those of a request
                that the decoder declined as a whole
    audits      [{"test", "check", "passed", "detail", "n", "ties"}], "attempt" if it is not the first; of a failed one
                "complaint", the detail without counts, and "cause", the requirement that it missed;
                if known, "difference": {"position", "emitted", "expected", "gap_nats"} of the first wrong token, and
                "likely_cause": {"kind", "guess", "remedy"};
                "sample": {"point", "row", "tokens", "first", "depths", "forced"} of a failed one, its shortest input,
                or {"case", "steps", "requests"}; a server's requests have "curl" commands
    repeats     [{"id", "model", "verdict", "gate", "fails", "test", "attempt", "alike"}]: further verdicts of claims
                that have one, which decide nothing; "alike": the same fact, recorded once more
    deselected  [{"nodeid", "shipped", "claim"? of the test, or null, "why"}]
    waivers     [{"of", "reason", "needed"}]
    known       [{"claim", "model", "expected", "outcomes" that pass, "changed", "why"}]: the verdicts beside the
                record
    tier        {"offered", "live": counts by model}, see ``tiers``

Raise ``REPORT.schema`` with any change of this form. This module needs no model, torch or extra.

The start mark guards against stale reports. A finished report stays until another run writes its own. A process that
dies while importing writes none, and a later reader would mistake the older report for its result. So each run writes a
mark next to the report, and removes it at a regular end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from emad_ref.errors import BadArgument, EmadError
from emad_ref.file_formats import FileFormat
from emad_ref.files import is_file, read_text, remove_file, resolve_path, write_atomically

REPORT_FILE = "report.json"

State = Literal["running", "complete", "interrupted", "usage error"]
# outcomes of a test; a later one overrules an earlier one
Outcome = Literal["not reported", "passed", "xpassed", "skipped", "xfailed", "failed", "error"]
TEST_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# kinds of a skip: absent premise; declined by the decoder; skipped by another hook or mark
SkipKind = Literal["", "not applicable", "refused", "left out"]

Report = Mapping[str, Any]


class BadReport(EmadError):
    """A report that is missing, foreign, of another schema, changed or unfinished; the message names the file."""


REPORT = FileFormat(
    "report", 8, "name a folder that `pytest --emad-report DIR` wrote, or run the suites again", BadReport
)


def write_report(folder: Path, report: Report) -> None:
    """Write ``report.json`` only. Raises BadFile."""
    REPORT.write_json(folder / REPORT_FILE, report)


def read_report(place: Path) -> Report:
    """Read the report of the run that wrote into the folder ``place``, or the report in the file ``place``.

    Raises:
        BadReport: no such folder or file; no report of this plugin; another schema; changed after it was written.
    """
    return REPORT.read_json(place if is_file(place) else place / REPORT_FILE)


def read_reports(folders: Sequence[Path]) -> list[Report]:
    """One report per folder, in order.

    Raises:
        BadArgument: no folder, or one twice.
        BadReport: as ``read_report``.
    """
    places = [resolve_path(folder) for folder in folders]
    if not places or len(set(places)) < len(places):
        raise BadArgument("folders", [str(folder) for folder in folders], "at least one, each once")
    return [read_report(folder) for folder in folders]


STARTED_FILE = "run.begun"  # holds when


def mark_run_started(folder: Path) -> None:
    """Write the start mark, if ``folder`` holds a report that could be mistaken for the new one."""
    if (folder / REPORT_FILE).is_file():
        write_atomically(folder / STARTED_FILE, f"{datetime.now(UTC).isoformat(timespec='seconds')}\n", "--emad-report")


def remove_run_start_mark(folder: Path) -> None:
    """Remove the start mark."""
    if (folder / STARTED_FILE).exists():
        remove_file(folder / STARTED_FILE, "--emad-report")


def unfinished_run_start_time(report: Path) -> str:
    """Start time of a run that never finished; "" without one. ``report``: the file or its folder."""
    note = (report if report.is_dir() else report.parent) / STARTED_FILE
    return read_text(note, "report").strip() if note.is_file() else ""
