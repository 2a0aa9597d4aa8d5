"""What complained in a run of a mutant, read from its report: tests, the run as a whole, and ``emad verify``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from emad_ref.errors import EmadError
from pytest_emad.report.deselection import list_shipped_tests
from pytest_emad.report.schema import read_report
from pytest_emad.report.verification import find_proof_shortfalls
from tests.mutants.mutant import RUN, VERIFY, Mutant


@dataclass(frozen=True)
class CheckComplaint:
    """One complaint. ``by`` names a shipped test, RUN or VERIFY; ``nodeid`` is "" without a test."""

    by: str
    nodeid: str
    message: str


def iterate_run_complaints(folder: Path) -> Iterator[CheckComplaint]:
    """Complaints of the tests of the run whose report lies in ``folder``, of the run, and of ``emad verify``."""
    try:
        report = read_report(folder)
    except EmadError as error:
        yield CheckComplaint(VERIFY, "", str(error))
        return
    for entry in report["tests"]:
        if entry["outcome"] in ("failed", "error"):
            yield CheckComplaint(str(entry["shipped"]), entry["nodeid"], entry["reason"])
    for failure in report["run"]["failures"]:
        yield CheckComplaint(RUN, "", failure)
    for fault in find_proof_shortfalls(report, [], list_shipped_tests(), None):
        yield CheckComplaint(VERIFY, "", fault)


def is_expected_complaint(mutant: Mutant, complaint: CheckComplaint) -> bool:
    """Whether the check that is meant for ``mutant`` complains, in the expected words."""
    named = not complaint.nodeid or mutant.case in complaint.nodeid  # complaints without a test have no parameters
    message = " ".join(complaint.message.split())  # messages of gates are wrapped to a terminal's width
    return complaint.by == mutant.expected_detector and named and re.search(mutant.says, message) is not None
