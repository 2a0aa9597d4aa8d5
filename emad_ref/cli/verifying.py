"""``emad verify``: does a report say that everything was judged, and that it passed? The second process of a gate.

A decoder lives in the process that judges it, and whatever happens there, a report that is missing, half done, or short
of a test cannot be made to look complete by an exit status:

    pytest --pyargs pytest_emad.suites --emad-report report/
    emad verify report/ --require-suite all --require-decoder foreign
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from emad_ref.cli.parsing import examples
from emad_ref.console import complain
from emad_ref.errors import BadArgument
from emad_ref.report.begun import unsettled
from emad_ref.report.faults import faults
from emad_ref.report.reading import read_report
from emad_ref.report.shipped import PREFIX, shipped_tests, suite_names

ALL = "all"
FAULTY = 1  # exit status


def verify(args: argparse.Namespace) -> int:
    """Check that a report is whole and green: every test of the suites asked for, nothing undecided or left out."""
    report = read_report(args.report)
    if report["schema"] == 1:
        raise BadArgument("report", str(args.report), "schema 2", "schema 1 does not say which tests ran: run again")
    shipped = shipped_tests()
    found = list(faults(report, required(args.require_suite, shipped), shipped, args.require_decoder))
    if when := unsettled(args.report):
        found.insert(0, f"a run that began later ({when}) never told how it ended; this is not its report: run again")
    for fault in found:
        complain(f"{args.report}: {fault}")
    if found:
        return FAULTY
    passed = sum(entry["outcome"] == "passed" for entry in report["tests"])
    waivers = "".join(f"; waived {waiver['of']}: {waiver['reason']}" for waiver in report["waivers"])
    print(f"{args.report}: complete, {passed} tests passed; decoder: {report['decoder']['name']}{waivers}")
    return 0


def required(names: Sequence[str], shipped: Sequence[str]) -> list[str]:
    """``suites/…`` for each suite named.

    Raises:
        BadArgument: there is no such suite, or this installation has none.
    """
    known = suite_names()
    if not shipped:
        raise BadArgument("--require-suite", ",".join(names), "installed suites", "install pytest-emad as a wheel")
    for name in names:
        if name not in (ALL, *known):
            raise BadArgument("--require-suite", name, f"{ALL}, or a comma list of {', '.join(known)}")
    return [PREFIX] if ALL in names else [f"{PREFIX}/{name}" for name in names]


def verify_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the folder of --emad-report")
    sub.add_argument("--require-suite", type=_words, default=(), metavar="NAMES",
                     help="all, or a comma list of suites that must have run, e.g. invariants,fidelity")  # fmt: skip
    sub.add_argument("--require-decoder", metavar="WHOSE", help="foreign, ours or the name of a plugin")
    examples(sub, "emad verify report/ --require-suite all --require-decoder foreign")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
