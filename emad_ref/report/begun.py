"""A run that has begun beside the report of one before it, and that must not pass for its own.

A finished report stays until another run has something to say. A process that ends itself while it is still importing
says nothing, and whoever looks afterwards finds the older report: so each run leaves a note, and takes it away when it
has ended in a way that it knows of.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from emad_ref.files import read_text, remove, write_atomically
from emad_ref.report.reading import REPORT

BEGUN = "run.begun"  # holds when


def announce(folder: Path) -> None:
    """Leave the note where ``folder`` holds a report; elsewhere there is nothing to be mistaken for."""
    if (folder / REPORT).is_file():
        write_atomically(folder / BEGUN, f"{datetime.now(UTC).isoformat(timespec='seconds')}\n", "--emad-report")


def settle(folder: Path) -> None:
    """Take it away."""
    if (folder / BEGUN).exists():
        remove(folder / BEGUN, "--emad-report")


def unsettled(report: Path) -> str:
    """When the run began that never told how it ended; "" where there is none. ``report``: the file or its folder."""
    note = (report if report.is_dir() else report.parent) / BEGUN
    return read_text(note, "report").strip() if note.is_file() else ""
