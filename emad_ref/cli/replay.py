"""``emad replay``: one row of a report again, alone: what was expected, what was found, on which input.

emad replay report/ EMAD-F1                    # the test that decided the claim
emad replay report/ test_forced --pdb          # a test, by its node id or part of it; a debugger where it fails

The run's own command is repeated with its options in the folder of the call, for this one test. A check of a decoder
keeps the shortest history on which it failed: prompt, depths and operating point are printed before the test runs.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from emad_ref.cli.arguments import add_examples
from emad_ref.errors import BadArgument, suggest_nearest
from emad_ref.report.schema import Report, read_report
from emad_ref.statistics.gate import deciding_leg, heading, measurement

NOT_IN_KEYWORDS = re.compile(r"[^\w:+\-.\[\]\\/]+")  # characters that pytest's -k does not take
WORKERS = ("-n", "--numprocesses")  # options of pytest-xdist, under which no debugger opens


def replay(args: argparse.Namespace) -> int:
    """Run one row of a report again, alone, with its seed and options; print what was expected and found."""
    report = read_report(args.report)
    if report["schema"] == 1:
        raise BadArgument("report", str(args.report), "schema 2", "schema 1 does not say which tests ran: run again")
    test = find_test(report, args.row)
    print("\n".join(recorded_lines(report, test)))
    with tempfile.TemporaryDirectory(prefix="emad-replay-") as folder:
        words = replay_words(report, test, Path(folder))
        words += ["--pdb"] if args.pdb else []
        print(f"replayed: pytest {shlex.join(words)}", flush=True)
        return subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode


def find_test(report: Report, row: str) -> str:
    """The node id of the test that ``row`` names: the id of a claim, or a node id or a part of one.

    Raises:
        BadArgument: no such row, or several; of several the only failed one is taken.
    """
    deciding = {str(claim["id"]): str(claim["test"]) for claim in report["claims"] if claim.get("test")}
    if row in deciding:
        return deciding[row]
    found = [test for test in report["tests"] if row in test["nodeid"]]
    failed = [test for test in found if test["outcome"] in ("failed", "error")]
    chosen = found if len(found) == 1 else failed
    if len(chosen) == 1:
        return str(chosen[0]["nodeid"])
    if found:
        expected = f"part of one test's node id, but it is in {len(found)}, of which {len(failed)} failed"
        raise BadArgument("ROW", row, expected, f"e.g. {(failed or found)[0]['nodeid']}")
    every = [*deciding, *(test["nodeid"] for test in report["tests"])]
    raise BadArgument("ROW", row, "a claim or test of this report", suggest_nearest(row, every))


def recorded_lines(report: Report, test: str) -> Iterator[str]:
    """What the report says of ``test``: its claims, its failed checks with their input, why it failed."""
    yield f"{test}, seed {report['settings'].get('seed', 0)}"
    for claim in report["claims"]:
        if claim.get("test") == test:
            yield f"recorded: {heading(claim, claim.get('title', ''))}"
            where = deciding_leg(claim)
            yield f"  {measurement(claim)}" + (f"; where: {where}" if where else "")
    for audit in report["audits"]:
        if audit["test"] == test and audit["passed"] is False:
            yield f"recorded: audit {audit['check']}: {audit['detail']}"
            yield from (f"  {name}: {value}" for name, value in audit.get("sample", {}).items())
    for entry in report["tests"]:
        if entry["nodeid"] == test and entry["reason"]:
            yield f"recorded: {entry['outcome']}: {entry['reason'].splitlines()[0]}"


def replay_words(report: Mapping[str, Any], test: str, folder: Path) -> list[str]:
    """Arguments for pytest: those of the run, this test alone, its report in ``folder`` instead of the run's."""
    words: Sequence[str] = report["run"]["command"][1:]
    parts = [part for part in NOT_IN_KEYWORDS.split(test.rpartition("::")[2]) if part not in ("", "and", "or", "not")]
    alone = ["-k", " and ".join(parts), "--emad-report", str(folder)]
    parallel = any(word.startswith(WORKERS) for word in words)
    return [*words, *alone, *(["-n", "0"] if parallel else [])]


def replay_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the folder of --emad-report")
    sub.add_argument("row", metavar="ROW", help="id of a claim, or node id of a test, or a part that only it has")
    sub.add_argument("--pdb", action="store_true", help="open pytest's debugger where it fails")
    add_examples(sub, "emad replay report/ EMAD-F1", "emad replay report/ test_forced --pdb")
