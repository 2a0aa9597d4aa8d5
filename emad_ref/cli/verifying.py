"""``emad verify``: does a report say that everything was judged, and that it passed? The second process of a gate.

A decoder lives in the process that judges it, and whatever happens there, a report that is missing, half done, or short
of a test cannot be made to look complete by an exit status:

    pytest --pyargs pytest_emad.suites --emad-report report/
    emad verify report/ --require-suite all --require-decoder foreign
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from emad_ref.cli.parsing import examples
from emad_ref.errors import BadArgument
from emad_ref.report.begun import unsettled
from emad_ref.report.missing import another, missing, waived
from emad_ref.report.reading import Report, read_report
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
        print(f"emad: {args.report}: {fault}", file=sys.stderr)
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


def faults(report: Report, asked: Sequence[str], shipped: Sequence[str], decoder: str | None) -> Iterator[str]:
    """One sentence for each thing that keeps ``report`` from being proof; none where it is.

    Args:
        report: of schema 2.
        asked: suites that must have run; what the run itself was told to run must have run in any case.
        shipped: names of the tests that this version ships.
        decoder: whose decoder must have been judged, None: anybody's.
    """
    if report["state"] != "complete":
        yield f"state={report['state']!r}, but expected 'complete': the run did not come to its end"
    run = report["run"]
    if run["exit_status"] != 0:
        yield f"exit_status={run['exit_status']!r}, but expected 0"
    yield from (f"the run failed as a whole: {failure}" for failure in run["failures"])
    for entry in report["tests"]:
        if entry["outcome"] in ("failed", "error"):
            yield f"{entry['nodeid']}: {entry['outcome']} ({entry['reason'].partition(chr(10))[0]})"
    if decoder is not None and (judged := another(report, decoder)):
        yield f"decoder={decoder!r} was required, but {judged}"
    waivers = [waiver["of"] for waiver in report["waivers"]]
    wanted = list(dict.fromkeys([*run["asked"], *asked]))
    # whoever's decoder it was: a run of ours may leave tests out, a proof may not
    yield from (str(gap) for gap in missing(report, wanted, shipped, always=True) if not waived(gap, waivers))


def verify_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the folder of --emad-report")
    sub.add_argument("--require-suite", type=_words, default=(), metavar="NAMES",
                     help="all, or a comma list of suites that must have run, e.g. invariants,fidelity")  # fmt: skip
    sub.add_argument("--require-decoder", metavar="WHOSE", help="foreign, ours or the name of a plugin")
    examples(sub, "emad verify report/ --require-suite all --require-decoder foreign")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
