"""``emad replay`` repeats one test of a reported run and prints its entry in the report.

    emad replay report/ EMAD-F1                # the test that decided this claim
    emad replay report/ test_forced --pdb      # a test by part of its node id; opens a debugger if it fails

The test runs in the folder of the reported run, with the arguments that decide it (``run.replay`` of the report).
Other arguments, such as those of output files, are left out and printed. Under another root folder, other settings or
another decoder the replay is refused before the first test. If a decoder failed an audit, the report holds the shortest
input on which it failed: prompt, depths and operating point are printed first.

The exit status is pytest's, and 1 if the result is not as recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from emad_ref.errors import BadArgument, suggest_nearest
from emad_ref.files import resolve_path, write_atomically
from emad_ref.models.fast.product_table import share_product_table
from pytest_emad.cli.arguments import add_examples, parse_path
from pytest_emad.cli.judgment import run_pytest
from pytest_emad.report.provenance import DISTRIBUTION
from pytest_emad.report.schema import REPORT_FILE, BadReport, Report, read_report
from pytest_emad.statistics.gate import deciding_leg_name, format_claim_heading, format_measurement_and_requirement

UNSET = ("PYTEST_ADDOPTS", "GITHUB_STEP_SUMMARY")  # variables of options, among the arguments already, and of an output


def replay_test(args: argparse.Namespace) -> int:
    """Repeat one test of a reported run with its seed and options, and print what the report says of it."""
    if args.keep and resolve_path(args.report) in (resolve_path(args.keep), resolve_path(args.keep / REPORT_FILE)):
        raise BadArgument("--keep", str(args.keep), "another folder than that of REPORT", "the replay would replace it")
    report = read_report(args.report)
    test = find_test_id(report, args.row)
    recorded = require_repeatable(report, args.report)
    print("\n".join(describe_recorded_test(report, test)))
    with tempfile.TemporaryDirectory(prefix="emad-replay-") as temporary:
        folder = resolve_path(args.keep or Path(temporary) / "report")
        question = Path(temporary) / "recorded.json"
        write_atomically(question, json.dumps({"test": test, "report": report}))
        words = build_pytest_arguments(recorded, question, folder)
        words += ["--pdb"] if args.pdb else []
        print(f"replayed in {recorded['folder']}: pytest {shlex.join(words)}")
        if recorded["left_out"]:
            print(f"left out: {' '.join(recorded['left_out'])}")
        sys.stdout.flush()
        with share_product_table(report["provenance"].get("products", {})):
            status = run_pytest(words, cwd=recorded["folder"], env=build_environment(recorded)).returncode
        lines, as_recorded = compare_with_replay(report, folder, question, test)
        print("\n".join(lines))
        if not args.keep:
            print(f"The replay's own report, {folder}, is deleted now; --keep DIR keeps one.")
        return status or int(not as_recorded)


def require_repeatable(report: Report, place: Path) -> Mapping[str, Any]:
    """The entry ``run.replay`` of ``report``, whose folder exists.

    Raises:
        BadArgument: a report that does not say how its run was started; a folder that does not exist.
    """
    recorded: Mapping[str, Any] | None = report["run"].get("replay")
    if not recorded:
        remedy = "name the folder of one run of pytest, which --emad-report DIR wrote"
        raise BadArgument("REPORT", str(place), "a report that says how its run was started", remedy)
    if not Path(recorded["folder"]).is_dir():
        remedy = "restore the folder, or record the run again"
        raise BadArgument("REPORT", str(place), f"its run's folder {recorded['folder']} to exist", remedy)
    return recorded


def build_pytest_arguments(recorded: Mapping[str, Any], question: Path, folder: Path) -> list[str]:
    """Arguments of pytest that run the test in the file ``question`` alone and write its report to ``folder``.

    The ini file's ``addopts`` are among the recorded arguments, and its ``cache_dir`` and ``log_file`` are outputs.
    """
    words = list(recorded["arguments"])
    outputs = {"cache_dir": ("no:cacheprovider", str(question.parent / "cache")), "log_file": ("no:logging", "")}
    redirected = [f"{name}={value}" for name, (blocked, value) in outputs.items() if blocked not in words]
    own = [f"--emad-replay={question}", f"--emad-report={folder}"]
    return [*words, *own, *(word for each in ("addopts=", *redirected) for word in ("-o", each))]


def build_environment(recorded: Mapping[str, Any]) -> dict[str, str]:
    """The environment of this process with the recorded choice of plugins, without further options and outputs."""
    chosen = recorded["environment"]
    kept = {name: value for name, value in os.environ.items() if name not in (*UNSET, *chosen)}
    return kept | {name: value for name, value in chosen.items() if value is not None}


def compare_with_replay(report: Report, folder: Path, question: Path, test: str) -> tuple[list[str], bool]:
    """Lines of the comparison with the report in ``folder``, and whether the result is as recorded."""
    refused = ["Not replayed: pytest stopped before the test; the reason stands above."], False
    try:
        replayed = read_report(folder)
    except BadReport:  # none was begun
        return refused
    earlier = all(
        str(question) not in word for word in replayed["run"]["command"]
    )  # of another replay with this --keep
    if earlier or replayed["state"] == "usage error":
        return refused
    comparisons = list(compare_results(report, replayed, test))
    lines = [*describe_version_differences(report, replayed), *map(format_comparison, comparisons)]
    return lines, bool(comparisons) and all(one.as_recorded for one in comparisons)


def find_test_id(report: Report, row: str) -> str:
    """The node id of the test that ``row`` names by a claim id or by part of a node id.

    If several node ids contain ``row``, the only failed one is meant.

    Raises:
        BadArgument: no such test, or several.
    """
    deciding = {str(claim["id"]): str(claim["test"]) for claim in report["claims"]}
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
    from pytest_emad.report.summary_layout import format_id_ranges  # it imports tabulate

    names = [*deciding, *(test["nodeid"].rpartition("::")[2].partition("[")[0] for test in report["tests"])]
    remedy = suggest_nearest(row, names) or f"its claims: {format_id_ranges([*deciding]) or 'none'}"
    raise BadArgument("ROW", row, "a claim or test of this report", remedy)


def describe_recorded_test(report: Report, test: str) -> Iterator[str]:
    """Lines on ``test`` from the report: its claims, its failed audits with their input, and the reason of failure."""
    yield f"{test}, seed {report['settings']['seed']}"
    for claim in report["claims"]:
        if claim["test"] == test:
            yield f"recorded: {format_claim_heading(claim, claim['title'])}"
            leg = deciding_leg_name(claim)
            yield f"  {format_measurement_and_requirement(claim)}" + (f"; where: {leg}" if leg else "")
    for audit in report["audits"]:
        if audit["test"] == test and audit["passed"] is False:
            yield f"recorded: audit {audit['check']}: {audit['detail']}"
            yield from describe_failing_input(audit.get("sample", {}))
    for entry in report["tests"]:
        if entry["nodeid"] == test and entry["reason"]:
            yield f"recorded: {entry['outcome']}: {entry['reason'].splitlines()[0]}"


def describe_failing_input(sample: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the shortest input of a failed audit: a row's tokens and depths, or the steps and requests of a case."""
    for name, value in sample.items():
        if name == "steps":
            yield from (f"  step {number}: {step}" for number, step in enumerate(value, start=1))
        elif name == "requests":
            for request in value:
                commands = request.get("curl", [])
                yield from (f"  {command}" for command in commands)
                if not commands:
                    yield f"  request: {json.dumps(request)}"
        else:
            yield f"  {name}: {value}"


class ResultComparison(NamedTuple):
    """What the report and the replay say of one claim, or of the test, and whether they agree."""

    recorded: str
    replayed: str
    as_recorded: bool


def compare_results(recorded: Report, replayed: Report, test: str) -> Iterator[ResultComparison]:
    """A comparison for each claim of ``test``, else one for the test.

    Claims are compared by verdict, tests by outcome and the first line of their reason.
    """
    claims = [claim for claim in recorded["claims"] if claim["test"] == test]
    found = {claim["id"]: claim for claim in replayed["claims"] if claim["test"] == test}
    for claim in claims:
        now = found.get(claim["id"])
        yield ResultComparison(
            f"{claim['id']}, {claim['verdict']}: {format_measurement_and_requirement(claim)}",
            f"{now['verdict']}: {format_measurement_and_requirement(now)}" if now else "not decided",
            now is not None and now["verdict"] == claim["verdict"],
        )
    for entry in recorded["tests"] if not claims else ():
        if entry["nodeid"] == test:
            outcomes = [_outcome(entry), *(_outcome(now) for now in replayed["tests"] if now["nodeid"] == test)]
            said = outcomes[-1] if outcomes[1:] else "did not run"
            yield ResultComparison(outcomes[0], said, outcomes[1:] == outcomes[:1])


def format_comparison(one: ResultComparison) -> str:
    said = "As recorded" if one.as_recorded else "Not as recorded"
    return f"{said}.\n  recorded: {one.recorded}\n  replayed: {one.replayed}"


def describe_version_differences(recorded: Report, replayed: Report) -> Iterator[str]:
    """A line if another version of this package, or of the decoder, gave the replay's result."""
    versions = [report["provenance"]["versions"][DISTRIBUTION] for report in (recorded, replayed)]
    decoders = [report["decoder"]["name"] for report in (recorded, replayed)]
    if versions[0] != versions[1]:
        yield f"Another version: recorded by {DISTRIBUTION} {versions[0]}, replayed by {versions[1]}."
    if decoders[0] != decoders[1]:
        yield f"Another version of the decoder: {decoders[0]} in the recorded run, {decoders[1]} now."


def _outcome(entry: Mapping[str, Any]) -> str:
    reason = str(entry["reason"]).partition("\n")[0]
    return f"{entry['outcome']}: {reason}" if reason else str(entry["outcome"])


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
