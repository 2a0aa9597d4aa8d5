"""Verbs that read ``report.json``, the file that ``pytest --emad-report DIR`` writes.

**emad report** writes the pages of one or more reports, or prints the summary that the run printed (``--text``).

**emad verify** checks that a report is complete and passed. The decoder under test runs in the process that judges it,
so it can end that process, skip tests or change the exit status. A second process reads the report instead:

    pytest --pyargs pytest_emad.suites --emad-report report/
    emad verify report/ --require-suite all --expect-decoder foreign

**emad compare** prints the differences of two reports, or the history of more than two. Its exit status can gate a
change: 0 if nothing got worse, 1 if something did, 4 if two reports cannot be compared. They cannot be compared if one
is missing, damaged or of an unfinished run, or if they have nothing in common. ``--fail-on`` selects the changes that
count as worse; each word includes those above it:

    never      none; the status only shows whether the reports can be compared
    gate       a gating claim survived and no longer does (or is missing), or is newly falsified;
               a test of the suites newly fails, or passed and is now declined by the decoder
    verdict    the same for every row that both reports have (default)
    moved      an estimate, or the perplexity of a point, moved for worse beyond both intervals
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emad_ref.console import print_error
from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import is_file, resolve_path
from pytest_emad.cli.arguments import add_examples, add_suite_option, parse_path
from pytest_emad.measurements.option_values import LEAVE_OUT, prepare_report_folder
from pytest_emad.report.deselection import PREFIX, list_shipped_tests, suite_folder_names
from pytest_emad.report.known_gaps import describe_known_gaps
from pytest_emad.report.schema import REPORT_FILE, Report, read_report, read_reports, unfinished_run_start_time
from pytest_emad.report.tiers import format_tier
from pytest_emad.report.verification import find_proof_shortfalls

if TYPE_CHECKING:
    from pytest_emad.report.comparison import ComparedReportRow, ReportComparison

ALL_SUITES = "all"
FAULTY = 1  # exit status of verify
GOT_WORSE = 1  # exit status of compare
MOST_LINES, LEAST_WIDTH = 40, 40  # most lines; columns
NOTE_LINES, GATE_LINES = 3, 8  # most lines of a note and of all gates together
MISSING = "missing"

FAIL_ON: dict[str, Callable[[ComparedReportRow], bool]] = {
    "never": lambda row: False,
    "gate": lambda row: row.gate and row.mark == "worse",
    "verdict": lambda row: row.mark == "worse",
    "moved": lambda row: row.mark in ("worse", "moved for worse"),
}


def write_report_pages(args: argparse.Namespace) -> None:
    """Write the pages of one or more reports (report.md, index.html, figures), or print their summaries."""
    from pytest_emad.report.comparison import changed_rows
    from pytest_emad.report.page import write_pages

    if args.text:
        _print_summaries(args)
        return
    if args.out is None and len(args.folders) > 1:
        raise BadArgument("out", None, "a folder for the pages of several reports", "pass --out DIR")
    if args.against is not None and len(args.folders) > 1:
        raise BadArgument("against", str(args.against), "a single DIR to compare with it", "name one DIR")
    reports = read_reports(args.folders)
    changes = changed_rows(read_report(args.against), reports[0]) if args.against is not None else []
    folders = [folder.parent if is_file(folder) else folder for folder in args.folders]
    out = args.out or folders[0]
    if [resolve_path(out)] != [resolve_path(folder) for folder in folders]:
        require_no_report(out)
    prepare_report_folder(str(out), Path(), "out")
    pages = write_pages(reports, out, changes)
    print(f"{out}: {pages}")


def require_no_report(out: Path) -> None:
    """Refuse a folder whose pages belong to its own report."""
    if is_file(out / REPORT_FILE):
        expected = "another folder than that of a report, whose own pages would be lost"
        raise BadArgument("out", str(out), expected, "pass --out DIR with a new one")


def _print_summaries(args: argparse.Namespace) -> None:
    """Print the summary of each report, in at most forty lines of the terminal's width."""
    from pytest_emad.report.summary import build_run_summary
    from pytest_emad.report.summary_layout import format_summary_lines_with_tones

    if args.out is not None:
        raise BadArgument("out", str(args.out), "no --out with --text, which writes no file", "leave out one of them")
    width = _terminal_width()
    for folder, report in zip(args.folders, read_reports(args.folders), strict=True):
        lines = format_summary_lines_with_tones(build_run_summary(report), width, [f"report read from {folder}"])
        print("\n".join(line for line, _ in lines))


def add_report_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("folders", type=parse_path, nargs="+", metavar="DIR", help="folder written by pytest --emad-report")
    add("--text", action="store_true", help="print the summary, at most forty lines, and write no file")
    add(
        "--out",
        type=parse_path,
        metavar="PATH",
        help="where to write: a folder (default for one report: its own folder)",
    )
    add("--against", type=parse_path, metavar="REPORT", help="earlier report; the page shows what changed since")
    add_examples(
        sub,
        "emad report report/",
        "emad report runs/a runs/b --out pages/",
        "emad report report/ --against base/",
        "emad report report/ --text",
    )


def verify_report_complete_and_passed(args: argparse.Namespace) -> int:
    """Check that a report is complete and passed: every required test ran, and nothing is undecided."""
    report = read_report(args.report)
    shipped = list_shipped_tests()
    suites = resolve_required_suite_folders(args.require_suite, shipped)
    messages = list(find_proof_shortfalls(report, suites, shipped, args.expect_decoder, args.tier))
    if start := unfinished_run_start_time(args.report):
        messages.insert(0, f"a later run, started {start}, did not finish, and this is not its report; run it again")
    for message in messages:
        print_error(f"{args.report}: {message}")
    if messages:
        return FAULTY
    passed = sum(entry["outcome"] == "passed" for entry in report["tests"])
    waivers = "".join(f"; waived {waiver['of']}: {waiver['reason']}" for waiver in report["waivers"])
    gaps = list(describe_known_gaps(report))
    state = f"complete but for {len(gaps)} known gap{'s' * (len(gaps) > 1)}" if gaps else "complete"
    print(f"{args.report}: {state}, {passed} tests passed; decoder: {report['decoder']['name']}{waivers}")
    for gap in gaps:
        print(f"not proven: {gap}")
    if report["decoder"]["foreign"]:
        print(format_tier(report))
    return 0


def resolve_required_suite_folders(names: Sequence[str], shipped: Sequence[str]) -> list[str]:
    """The folder, ``suites/…``, of each suite that ``--require-suite`` names.

    Raises:
        BadArgument: an unknown suite, or the suites are not installed.
    """
    known = suite_folder_names()
    if not shipped:
        raise BadArgument(
            "--require-suite", ",".join(names), "suites that are installed", "install pytest-emad from a wheel"
        )
    for name in names:
        if name not in (ALL_SUITES, *known):
            raise BadArgument("--require-suite", name, f"{ALL_SUITES}, or a comma list of {', '.join(known)}")
    return [PREFIX] if ALL_SUITES in names else [f"{PREFIX}/{name}" for name in names]


def add_verify_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "report",
        type=parse_path,
        metavar="REPORT",
        help="report.json or its folder, as written by pytest --emad-report",
    )
    add("--require-suite", type=_comma_list, default=(), metavar="NAMES",
        help="suites that must have run: all, or a comma list such as invariants,fidelity")  # fmt: skip
    add_suite_option(sub, "expect-decoder")
    add_suite_option(sub, "tier")
    add_examples(
        sub,
        "emad verify report/ --require-suite all --expect-decoder foreign",
        "emad verify report/ --tier tokens",
    )


def _comma_list(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:  # such as an unset shell variable, which would silently require no suite
        raise argparse.ArgumentTypeError(f"{text!r}, but expected a comma list; {LEAVE_OUT}")
    return words


def compare(args: argparse.Namespace) -> int:
    """Compare reports: changed verdicts and numbers that moved; exit status 1 if something got worse."""
    from pytest_emad.report import comparison

    places = _report_places(args.reports)
    reports = [read_report(place) for place in places]
    for place, report in zip(places, reports, strict=True):
        comparison.require_complete(report, place)
    if len(reports) > 2:
        print("\n".join([*_history_lines(reports, args.markdown), "", "The last two:", ""]))
    result = comparison.compare_reports(*reports[-2:])
    failing = [row for row in result.rows if FAIL_ON[args.fail_on](row)]
    if not (result.has_common_rows or failing):
        raise EmadError(
            f"{places[-2]} and {places[-1]} have no claim, point or test in common: nothing can be compared; "
            "run the same suites for both"
        )
    lines = (
        format_comparison_markdown(result, args.verbose)
        if args.markdown
        else format_comparison_text(result, args.verbose)
    )
    print("\n".join([*lines, _exit_line(failing, args.fail_on)]))
    return GOT_WORSE if failing else 0


def _files_below(folder: Path) -> Iterator[Path]:
    """The report of each subfolder, or those of its subfolders, as a download of artifacts lays them out."""
    for each in folder.glob("*/"):
        whole = each / REPORT_FILE
        yield from [whole] if whole.is_file() else each.glob(f"*/{REPORT_FILE}")


def _report_places(arguments: Sequence[Path]) -> list[Path]:
    """The reports to compare: those of ``arguments``, or the subfolders of a single folder, oldest first.

    Raises:
        BadArgument: fewer than two reports, or one twice.
        BadReport: a report that cannot be read.
    """
    places = list(arguments)
    if len(arguments) == 1 and not is_file(arguments[0] / REPORT_FILE):
        reports = {path.parent: read_report(path) for path in _files_below(arguments[0])}
        places = sorted(reports, key=lambda place: str(reports[place]["run"]["started"]))
    if len(places) < 2 or len({resolve_path(place) for place in places}) < len(places):
        value = ", ".join(map(str, places)) or str(arguments[0])
        raise BadArgument("REPORT", value, "two reports or more, each once, or a folder of report folders")
    return places


def _history_lines(reports: Sequence[Report], markdown: bool) -> Iterator[str]:
    """Each claim of ``reports``, oldest first: two lines in a terminal, a row of a table in Markdown."""
    from tabulate import tabulate

    from pytest_emad.report.comparison import claim_history_rows, format_run_label
    from pytest_emad.report.tables import escape_markdown

    rows = claim_history_rows(reports)
    yield f"{len(reports)} reports, from {format_run_label(reports[0])} to {format_run_label(reports[-1])}"
    yield ""
    if markdown:
        escaped = [{key: escape_markdown(text) for key, text in row.items()} for row in rows]
        yield tabulate(escaped, headers="keys", tablefmt="github", disable_numparse=True)
    else:
        for row in rows:
            yield from _wrap(f"{row['claim']:8}  {row['in words']}")
            yield from _wrap(f"    {row['history']}  {row['verdicts']}, {row['first → last']} ({row['unit']})")


def _exit_line(failing: Sequence[ComparedReportRow], fail_on: str) -> str:
    if fail_on == "never":
        return "Nothing fails: --fail-on never."
    rows = f"{len(failing)} row{'' if len(failing) == 1 else 's'}" if failing else "nothing"
    return f"{'Fails' if failing else 'Passes'} by --fail-on {fail_on}: {rows} got worse."


def _headline(result: ReportComparison) -> str:
    """The number of rows of each mark, ``1 worse, 12 as before``."""
    marks = [row.mark for row in result.rows]
    counts = [f"{marks.count(mark)} {mark}" for mark in dict.fromkeys(marks)]
    tests = [f"{result.tests} test{'' if result.tests == 1 else 's'} as before"] if result.tests else []
    return ", ".join(counts + tests)


# ---------------------------------------------------------------- in a terminal


def format_comparison_text(result: ReportComparison, verbose: bool) -> list[str]:
    """The comparison in lines of the terminal's width.

    Without ``verbose`` there are at most ``MOST_LINES`` lines, counting the line of ``_exit_line``.
    """
    unlike = _wrap(f"not like for like: {'; '.join(result.unlike)}", None if verbose else 3) if result.unlike else []
    labels = [_cut(f"{name}: {label}") for name, label in (("old", result.old), ("new", result.new))]
    head = [*labels, *unlike, "", *_wrap(_headline(result))]
    named = [] if verbose else [line for sentence in _one_sided_lines(result) for line in _wrap(sentence, 2)]
    tail = ["", *named, *_wrap(_gates_line(result), None if verbose else GATE_LINES)]
    room = MOST_LINES - len(head) - len(tail) - 2  # for the line about omitted rows, and the exit line
    body: list[str] = []
    blocks = list(_blocks(result, verbose))
    for number, block in enumerate(blocks):
        if not verbose and len(body) + len(block) > room:
            body.append(f"… and {len(blocks) - number} more rows: pass -v")
            break
        body += block
    return [line.rstrip() for line in (*head, *body, *tail)]


def _one_sided_lines(result: ReportComparison) -> Iterator[str]:
    """A line for the rows that only the new report has, and one for those that only the old report has."""
    from pytest_emad.report.comparison import MARKS

    for mark, (heading, display) in MARKS.items():
        names = [row.name for row in result.rows if display == "named" and row.mark == mark]
        if names:
            yield f"{heading}: {', '.join(names)}"


def _gates_line(result: ReportComparison) -> str:
    """Every gating claim by its title, and its verdict in the new report."""
    gates = [row for row in result.rows if row.gate and row.kind == "claim"]
    named = [(f"{gate.title} ({gate.name})" if gate.title else gate.name, gate.outcome) for gate in gates]
    return f"Gates now: {'; '.join(f'{name}: {outcome or MISSING}' for name, outcome in named) or 'none'}"


def _listed_rows(result: ReportComparison, verbose: bool) -> list[ComparedReportRow]:
    from pytest_emad.report.comparison import MARKS

    return [row for row in result.rows if verbose or MARKS[row.mark][1] == "listed"]


def _blocks(result: ReportComparison, verbose: bool) -> Iterator[list[str]]:
    """Lines of each row, its reason cut to ``NOTE_LINES`` without ``verbose``; the first of a mark has a heading."""
    from pytest_emad.report.comparison import MARKS

    last = None
    for row in _listed_rows(result, verbose):
        lines = [] if row.mark == last else ["", MARKS[row.mark][0]]
        lines += [*_wrap(f"  {row.what}", 2), *_wrap(f"    {row.difference}")]
        yield lines + (_wrap(f"    {row.reason}", None if verbose else NOTE_LINES) if row.reason else [])
        last = row.mark


def _terminal_width() -> int:
    return max(shutil.get_terminal_size((80, 24)).columns, LEAST_WIDTH)


def _wrap(line: str, max_lines: int | None = None) -> list[str]:
    """``line`` in lines of the terminal's width; "…" ends the last line if ``max_lines`` is too few."""
    return textwrap.wrap(
        line,
        _terminal_width(),
        subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=" …",
    )


def _cut(line: str, end: str = "") -> str:
    """``line`` and ``end`` in the terminal's width; ``line`` is cut if both are too long."""
    room = _terminal_width() - len(end)
    return (line if len(line) <= room else f"{line[: room - 1]}…") + end


# ---------------------------------------------------------------- for a job summary


def format_comparison_markdown(result: ReportComparison, verbose: bool) -> list[str]:
    """The comparison as Markdown of GitHub: a table with one row per listed change. Names and reasons are escaped."""
    from tabulate import tabulate

    from pytest_emad.report.tables import escape_markdown

    unlike = f"- not like for like: {escape_markdown('; '.join(result.unlike))}"
    rows = [{key: escape_markdown(text) for key, text in row.to_row().items()} for row in _listed_rows(result, verbose)]
    return [
        f"### emad compare: {escape_markdown(_headline(result))}",
        "",
        f"- old: {escape_markdown(result.old)}",
        f"- new: {escape_markdown(result.new)}",
        *([unlike] if result.unlike else []),
        "",
        *([tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True), ""] if rows else []),
        *([] if verbose else [f"{escape_markdown(line)}\n" for line in _one_sided_lines(result)]),
        f"{escape_markdown(_gates_line(result))}. \\* the row gates.",
        "",
    ]


def add_compare_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("reports", type=parse_path, nargs="+", metavar="REPORT",
        help="two reports, the old one first; with more, or with one folder of report folders, print a history of "
             "every claim and compare the last two")  # fmt: skip
    add("--fail-on", choices=FAIL_ON, default="verdict",
        help="what makes the exit status 1: nothing (never), a gate that got worse (gate), any verdict that got worse "
             "(verdict), or also a number that moved for worse (moved) (default: verdict)")  # fmt: skip
    add("--markdown", action="store_true", help="print Markdown, for the job summary of GitHub Actions")
    add("-v", "--verbose", action="store_true", help="list every row, also unchanged ones")
    add_examples(
        sub,
        "emad compare base/ report/",
        "emad compare nightly/",
        "emad compare base/ report/ --fail-on gate -v",
        'emad compare base/ report/ --markdown >> "$GITHUB_STEP_SUMMARY"',
    )
