"""Outcome of a planted defect, read from the report of the run that judged it.

A defect is caught if the check that is meant for it complains in the expected words. A decoder is honest if no check
complains.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from emad_ref.errors import EmadError
from pytest_emad.mutants.mutant import RUN, VERIFY, Mutant
from pytest_emad.report.deselection import NO_PAIR, list_shipped_tests
from pytest_emad.report.schema import Report, read_report
from pytest_emad.report.verification import find_proof_shortfalls

LOG_FILE = "log"  # output of the run, beside the report
CAUGHT, GREEN, ABSENT = "caught", "green", "not applicable"
EXPECTED_OUTCOMES = (CAUGHT, GREEN, ABSENT)
CAUGHT_ELSEWHERE, NOT_CAUGHT, FALSE_ALARM = "caught by another check only", "NOT CAUGHT", "HONEST, BUT NOT GREEN"
UNFINISHED = "DID NOT END"
GOLDEN = "test_golden.py"  # its checks need a golden of this very model
NOT_APPLICABLE_REASON = re.compile(r"MutantNotApplicable: (.*)")
MESSAGE_LETTERS = 160  # most letters of a message in the table


@dataclass(frozen=True)
class MutationResult:
    """Outcome of one planted decoder. ``by`` names the check that complained, ``message`` its complaint."""

    name: str
    kind: str
    does: str
    meant: str
    outcome: str
    by: str
    message: str
    seconds: float

    @property
    def is_expected(self) -> bool:
        return self.outcome in EXPECTED_OUTCOMES


@dataclass(frozen=True)
class CheckComplaint:
    """One complaint. ``by`` names a shipped test or another source; ``nodeid`` is "" without a test."""

    by: str
    nodeid: str
    message: str


def classify_mutant_run(planted: Mutant, reported: Sequence[CheckComplaint], folder: Path) -> tuple[str, str, str]:
    """(outcome, name of the check that complained, message).

    ``reported``: ``iterate_run_complaints`` of the run whose report lies in ``folder``.
    """
    for complaint in reported:
        if match := NOT_APPLICABLE_REASON.search(complaint.message):
            return ABSENT, "", match[1]
    if planted.is_honest:
        if not reported:
            return GREEN, "", ""
        return FALSE_ALARM, reported[0].by, reported[0].message
    for complaint in reported:
        if _is_meant(planted, complaint):
            return CAUGHT, complaint.by, complaint.message
    with suppress(EmadError):  # a run without a report has complaints
        if reason := premise_unavailable_reason(planted, read_report(folder)):
            return ABSENT, "", reason
    if reported:
        return CAUGHT_ELSEWHERE, reported[0].by, reported[0].message
    return NOT_CAUGHT, "", planted.does


def _is_meant(planted: Mutant, complaint: CheckComplaint) -> bool:
    named = not complaint.nodeid or planted.case in complaint.nodeid  # complaints without a test have no parameters
    message = " ".join(complaint.message.split())  # messages of gates are wrapped to a terminal's width
    return complaint.by == planted.expected_detector and named and re.search(planted.says, message) is not None


def premise_unavailable_reason(planted: Mutant, report: Report) -> str:
    """Reason why the intended check cannot catch ``planted`` in this run; "" if it can.

    No golden of this model, no pair of models, or a claim that does not apply to it; not a decoder that declines.
    """
    if GOLDEN in planted.test:
        return next((note for note in report["notes"] if "no golden recorded" in note), "")
    if not report.get("tests"):
        left = {entry["why"] for entry in report.get("deselected", ()) if entry["shipped"] == f"suites/{planted.test}"}
        return NO_PAIR if left == {NO_PAIR} else ""
    verdicts = (claim for claim in report["claims"] if claim["id"] == planted.case and not claim.get("refused"))
    return next((f"{each['id']}: {each['reason']}" for each in verdicts if each["verdict"] == "not applicable"), "")


def iterate_run_complaints(folder: Path) -> Iterator[CheckComplaint]:
    """Complaints of the tests of a run, then of the run, then of ``emad verify`` reading its report."""
    try:
        report = read_report(folder)
    except EmadError as error:
        log = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        yield CheckComplaint(VERIFY, "", f"{error}: {' '.join(log[-3:])}")
        return
    for entry in report["tests"]:
        if entry["outcome"] in ("failed", "error"):
            yield CheckComplaint(str(entry["shipped"]), entry["nodeid"], entry["reason"])
    for failure in report["run"]["failures"]:
        yield CheckComplaint(RUN, "", failure)
    for fault in find_proof_shortfalls(report, [], list_shipped_tests(), None):
        yield CheckComplaint(VERIFY, "", fault)


def are_results_as_expected(results: Sequence[MutationResult]) -> bool:
    """Whether every result is as expected, and at least one decoder was judged."""
    return all(result.is_expected for result in results) and any(result.outcome != ABSENT for result in results)


def format_mutation_counts(results: Sequence[MutationResult]) -> str:
    """Text with the counts of outcomes."""
    counts = Counter(result.outcome for result in results)
    return "emad selfcheck: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def format_mutation_table(results: Sequence[MutationResult]) -> str:
    """Table of defects with the check that caught each."""
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


def format_mutation_result(result: MutationResult) -> str:
    """One line for a result, printed as soon as it is known."""
    by = f" by {_short_name(result.by)}" if result.by else ""
    return f"{result.name}: {result.outcome}{by} ({result.seconds:.1f} s): {result.message[:MESSAGE_LETTERS]}"


def _short_name(test: str) -> str:
    return test.removeprefix("suites/")
