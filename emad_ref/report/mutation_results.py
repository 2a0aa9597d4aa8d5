"""What became of a planted decoder, by the report of the run that judged it: who complained, and was that meant.

A defect is caught where the check that is meant for it complains in the words it is meant to. Honest decoders are those
of whom nobody complains.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from emad_ref.errors import EmadError
from emad_ref.mutants.mutant import RUN, VERIFY, Mutant
from emad_ref.report.deselection import shipped_tests
from emad_ref.report.schema import read_report
from emad_ref.report.verification import faults

LOG_FILE = "log"  # beside the report: what the run said
CAUGHT, GREEN, ABSENT = "caught", "green", "not applicable"
EXPECTED_OUTCOMES = (CAUGHT, GREEN, ABSENT)
CAUGHT_ELSEWHERE, NOT_CAUGHT, FALSE_ALARM = "caught by another check only", "NOT CAUGHT", "HONEST, BUT NOT GREEN"
GOLDEN = "test_golden.py"  # what it catches needs a record of this very model
NOT_APPLICABLE_REASON = re.compile(r"NotPlantable: (.*)")
MESSAGE_LETTERS = 160  # letters of a message in the table


@dataclass(frozen=True)
class MutationResult:
    """What became of one planted decoder; ``by``: who complained, ``message``: of what."""

    name: str
    kind: str
    does: str
    meant: str
    outcome: str
    by: str
    message: str
    seconds: float

    @property
    def right(self) -> bool:
        return self.outcome in EXPECTED_OUTCOMES


@dataclass(frozen=True)
class Complaint:
    """``by``: the name of a shipped test, or who else; ``nodeid`` "" where it is no test's."""

    by: str
    nodeid: str
    message: str


def mutation_outcome(planted: Mutant, heard: Sequence[Complaint], folder: Path) -> tuple[str, str, str]:
    """(outcome, who complained, message); ``heard``: ``complaints`` of the run whose report lies in ``folder``."""
    for complaint in heard:
        if found := NOT_APPLICABLE_REASON.search(complaint.message):
            return ABSENT, "", found[1]
    if planted.honest:
        if not heard:
            return GREEN, "", ""
        return FALSE_ALARM, heard[0].by, heard[0].message
    for complaint in heard:
        if _is_meant(planted, complaint):
            return CAUGHT, complaint.by, complaint.message
    if heard:
        return CAUGHT_ELSEWHERE, heard[0].by, heard[0].message
    if GOLDEN in planted.test and (reason := _without_golden(folder)):
        return ABSENT, "", reason
    return NOT_CAUGHT, "", planted.does


def _is_meant(planted: Mutant, complaint: Complaint) -> bool:
    named = not complaint.nodeid or planted.case in complaint.nodeid  # what is no test's has no parameters
    said = " ".join(complaint.message.split())  # a gate's message is wrapped as wide as a terminal
    return complaint.by == planted.meant and named and re.search(planted.says, said) is not None


def _without_golden(folder: Path) -> str:
    """Why a golden could not catch anything; "" where there was one."""
    return next((note for note in read_report(folder)["notes"] if "no golden recorded" in note), "")


def complaints(folder: Path) -> Iterator[Complaint]:
    """Of the tests of a run, then of the run, then of ``emad verify`` when it reads the report."""
    try:
        report = read_report(folder)
    except EmadError as error:
        log = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        yield Complaint(VERIFY, "", f"{error}: {' '.join(log[-3:])}")
        return
    for entry in report["tests"]:
        if entry["outcome"] in ("failed", "error"):
            yield Complaint(str(entry["shipped"]), entry["nodeid"], entry["reason"])
    for failure in report["run"]["failures"]:
        yield Complaint(RUN, "", failure)
    for fault in faults(report, [], shipped_tests(), None):
        yield Complaint(VERIFY, "", fault)


def is_proved(results: Sequence[MutationResult]) -> bool:
    """Nothing is other than it should be, and something was there to be caught or passed."""
    return all(result.right for result in results) and any(result.outcome != ABSENT for result in results)


def summarize_mutations(results: Sequence[MutationResult]) -> str:
    """How many of which outcome."""
    counts = Counter(result.outcome for result in results)
    return "emad selfcheck: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def mutation_table(results: Sequence[MutationResult]) -> str:
    """Which check caught which."""
    rows = [
        {
            "planted": result.name,
            "kind": result.kind,
            "check meant": _short_name(result.meant),
            "outcome": result.outcome,
            "caught by": _short_name(result.by),
            "message": result.message[:MESSAGE_LETTERS],
        }
        for result in results
    ]
    return str(tabulate(rows, headers="keys", disable_numparse=True))


def mutation_line(result: MutationResult) -> str:
    """One of them, when it is known."""
    by = f" by {_short_name(result.by)}" if result.by else ""
    return f"{result.name}: {result.outcome}{by} ({result.seconds:.1f} s): {result.message[:MESSAGE_LETTERS]}"


def _short_name(test: str) -> str:
    return test.removeprefix("suites/")
