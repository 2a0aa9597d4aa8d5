"""Acceptance length that an earlier run measured, from its report, as the record of ENG-5.

The verdict of ENG-5 lists the mean length with its interval and n, so a report is a second sample. A curve of a file in
YAML is read by ``measurements.acceptance_record``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument, suggest_nearest
from pytest_emad.measurements.acceptance_record import LENGTH, AcceptanceRecord, parse_acceptance_record
from pytest_emad.report.schema import REPORT_FILE, read_report

ACCEPTANCE = "ENG-5"


def read_acceptance_record(text: str, base: Path, where: str) -> AcceptanceRecord:
    """The record that ``FILE[,MODEL[,MODE[,DRAFTED]]]`` names: a curve, or ``FOLDER[,MODEL]``, the report of a run.

    Raises:
        BadArgument: as ``parse_acceptance_record``; no verdict of ENG-5 with a length and an interval, or several.
        BadReport: as ``read_report``.
    """
    name, *choice = (part.strip() for part in text.split(","))
    place = base / name
    if not name or not (place.name == REPORT_FILE or (place / REPORT_FILE).is_file()):
        return parse_acceptance_record(text, base, where)
    found = {
        str(claim["model"]): claim
        for claim in read_report(place)["claims"]
        if claim["id"] == ACCEPTANCE and _length_leg(claim) is not None
    }
    model = choice[0] if choice else next(iter(found), "")
    if len(choice) > 1 or model not in found or (len(found) > 1 and not choice):
        expected = f"FOLDER[,MODEL] of a run that measured the length of one of {', '.join(found) or 'no model'}"
        raise BadArgument(where, text, expected, suggest_nearest(model, found))
    leg = _length_leg(found[model])
    assert leg is not None, "only such claims were kept"
    bounds, n = leg["interval"], int(leg["n"])
    if bounds is None or n < 2:
        raise BadArgument(where, text, "a length with an interval", f"this one is of {n} documents: run it on more")
    low, high = map(float, bounds)
    drafted = sum(each["on"].isdecimal() and bool(each["estimate"]) for each in found[model]["legs"])
    return AcceptanceRecord(float(leg["estimate"]), drafted, f"{model}, an earlier run", (low, high), n)


def _length_leg(claim: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The leg with the length itself: measured alone, or against an exact record."""
    legs = (leg for leg in claim["legs"] if leg["on"] == LENGTH)
    return next((leg for leg in legs if leg["estimate"] is not None), None)
