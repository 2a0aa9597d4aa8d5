"""``emad replay`` repeats one test of a reported run and prints its entry in the report.

    emad replay report/ EMAD-F1                # the test that decided this claim
    emad replay report/ test_forced --pdb      # a test by part of its node id; opens a debugger if it fails

The test runs in the current folder with the options and the seed of the reported run. If a decoder failed an audit, the
report holds the shortest input on which it failed: prompt, depths and operating point are printed first.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from emad_ref.cli.arguments import add_examples, parse_path
from emad_ref.cli.reports import read_report_with_test_list
from emad_ref.errors import BadArgument, suggest_nearest
from emad_ref.files import resolve_path
from emad_ref.report.provenance import DISTRIBUTION
from emad_ref.report.schema import REPORT_FILE, BadReport, Report
from emad_ref.statistics.gate import deciding_leg_name, format_claim_heading, format_measurement_and_requirement

NOT_IN_KEYWORDS = re.compile(r"[^\w:+\-.\[\]\\/]+")  # characters that are not allowed in an expression of pytest's -k
DEMANDS = ("--emad-expect-decoder", "--emad-tier")  # options with a value that fail a run of one test
XDIST_OPTIONS = ("-n", "--numprocesses")  # options of pytest-xdist, which cannot open a debugger


def replay_test(args: argparse.Namespace) -> int:
    """Repeat one test of a reported run with its seed and options, and print what the report says of it."""
    if args.keep and resolve_path(args.report) in (resolve_path(args.keep), resolve_path(args.keep / REPORT_FILE)):
        raise BadArgument("--keep", str(args.keep), "another folder than that of REPORT", "the replay would replace it")
    report = read_report_with_test_list(args.report)
    test = find_test_id(report, args.row)
    print("\n".join(describe_recorded_test(report, test)))
    with tempfile.TemporaryDirectory(prefix="emad-replay-") as temporary:
        folder = args.keep or Path(temporary)
        words = build_pytest_arguments(report, test, folder)
        words += ["--pdb"] if args.pdb else []
        print(f"replayed: pytest {shlex.join(words)}", flush=True)
        status = subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
        with suppress(BadReport):  # an aborted run wrote none, and printed the reason
            print("\n".join(replay_comparison_lines(report, read_report_with_test_list(folder), test)))
        if not args.keep:
            print(f"The replay's own report, {temporary}, is deleted now; --keep DIR keeps one.")
        return status


def find_test_id(report: Report, row: str) -> str:
    """The node id of the test that ``row`` names by a claim id or by part of a node id.

    If several node ids contain ``row``, the only failed one is meant.

    Raises:
        BadArgument: no such test, or several.
    """
    deciding = {str(claim["id"]): str(claim["test"]) for claim in report["claims"] if claim.get("test")}
    if row.upper() in (by_id := {claim.upper(): test for claim, test in deciding.items()}):
        return by_id[row.upper()]
    matches = [test for test in report["tests"] if row in test["nodeid"]]
    failed = [test for test in matches if test["outcome"] in ("failed", "error")]
    candidates = matches if len(matches) == 1 else failed
    if len(candidates) == 1:
        return str(candidates[0]["nodeid"])
    if matches:
        expected = f"part of one node id; {len(matches)} contain it, of which {len(failed)} failed"
        raise BadArgument("ROW", row, expected, f"e.g. {(failed or matches)[0]['nodeid']}")
    from emad_ref.report.summary import format_id_ranges  # it imports tabulate

    names = [*deciding, *(test["nodeid"].rpartition("::")[2].partition("[")[0] for test in report["tests"])]
    remedy = suggest_nearest(row, names) or f"its claims: {format_id_ranges([*deciding]) or 'none'}"
    raise BadArgument("ROW", row, "a claim or test of this report", remedy)


def describe_recorded_test(report: Report, test: str) -> Iterator[str]:
    """Lines on ``test`` from the report: its claims, its failed audits with their input, and the reason of failure."""
    yield f"{test}, seed {report['settings'].get('seed', 0)}"
    for claim in report["claims"]:
        if claim.get("test") == test:
            yield f"recorded: {format_claim_heading(claim, claim.get('title', ''))}"
            leg = deciding_leg_name(claim)
            yield f"  {format_measurement_and_requirement(claim)}" + (f"; where: {leg}" if leg else "")
    for audit in report["audits"]:
        if audit["test"] == test and audit["passed"] is False:
            yield f"recorded: audit {audit['check']}: {audit['detail']}"
            yield from (f"  {name}: {value}" for name, value in audit.get("sample", {}).items())
    for entry in report["tests"]:
        if entry["nodeid"] == test and entry["reason"]:
            yield f"recorded: {entry['outcome']}: {entry['reason'].splitlines()[0]}"


def replay_comparison_lines(recorded: Report, replayed: Report, test: str) -> Iterator[str]:
    """Lines for each claim of ``test``, else for the test: recorded result, replayed result, and whether they agree.

    Claims are compared by verdict, tests by outcome and the first line of their reason.
    """
    yield from _differences(recorded, replayed, test)
    claims = [claim for claim in recorded["claims"] if claim.get("test") == test]
    found = {claim["id"]: claim for claim in replayed["claims"] if claim.get("test") == test}
    for claim in claims:
        now = found.get(claim["id"])
        yield _agreement(
            f"{claim['id']}, {claim['verdict']}: {format_measurement_and_requirement(claim)}",
            f"{now['verdict']}: {format_measurement_and_requirement(now)}" if now else "not decided",
            now is not None and now["verdict"] == claim["verdict"],
        )
    for entry in recorded["tests"] if not claims else ():
        if entry["nodeid"] == test:
            outcomes = [_outcome(entry), *(_outcome(now) for now in replayed["tests"] if now["nodeid"] == test)]
            yield _agreement(outcomes[0], outcomes[-1] if outcomes[1:] else "did not run", outcomes[1:] == outcomes[:1])


def _differences(recorded: Report, replayed: Report, test: str) -> Iterator[str]:
    """Differences between the replay and the recorded run: version, decoder, an absent test."""
    versions = [report["provenance"].get("versions", {}).get(DISTRIBUTION) for report in (recorded, replayed)]
    decoders = [report["decoder"]["name"] for report in (recorded, replayed)]
    if versions[0] != versions[1]:
        yield f"Another version: recorded by {DISTRIBUTION} {versions[0]}, replayed by {versions[1]}."
    if all(now["nodeid"] != test for now in replayed["tests"]):
        yield "The replay found no such test: run it in the folder of the recorded run, with the version that wrote it."
    elif decoders[0] != decoders[1]:
        yield (
            f"Another decoder: {decoders[0]} in the recorded run, {decoders[1]} now; run it in the folder of the "
            "recorded run."
        )


def _outcome(entry: Mapping[str, Any]) -> str:
    reason = str(entry["reason"]).partition("\n")[0]
    return f"{entry['outcome']}: {reason}" if reason else str(entry["outcome"])


def _agreement(recorded: str, replayed: str, same: bool) -> str:
    return f"{'As recorded' if same else 'Not as recorded'}.\n  recorded: {recorded}\n  replayed: {replayed}"


def build_pytest_arguments(report: Mapping[str, Any], test: str, folder: Path) -> list[str]:
    """Arguments of pytest that run only ``test``, with the options of the run, and write its report to ``folder``.

    Omits options that require all tests.
    """
    words: Sequence[str] = list(_without_demands(report["run"]["command"][1:]))
    parts = [part for part in NOT_IN_KEYWORDS.split(test.rpartition("::")[2]) if part not in ("", "and", "or", "not")]
    selection = ["-k", " and ".join(parts), "--emad-report", str(folder)]
    is_parallel = any(word.startswith(XDIST_OPTIONS) for word in words)
    return [*words, *selection, *(["-n", "0"] if is_parallel else [])]


def _without_demands(words: Sequence[str]) -> Iterator[str]:
    for before, word in zip(["", *words], words, strict=False):
        if before not in DEMANDS and word.partition("=")[0] not in DEMANDS:
            yield word


def add_replay_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "report",
        type=parse_path,
        metavar="REPORT",
        help="report.json or its folder, as written by pytest --emad-report",
    )
    sub.add_argument("row", metavar="ROW", help="claim id, or node id of a test, or part of one node id")
    sub.add_argument("--pdb", action="store_true", help="open pytest's debugger if the test fails")
    sub.add_argument("--keep", type=parse_path, metavar="DIR", help="folder that keeps the report of the replay")
    add_examples(
        sub,
        "emad replay report/ EMAD-F1",
        "emad replay report/ test_forced --pdb",
        "emad replay report/ EMAD-E1 --keep again/",
    )
