"""``emad report``: the pages of one report folder, or of several together, made from report.json alone.

emad report out              # writes the pages into out
emad report out --text       # prints the summary that the run printed

``emad verify``: does a report say that everything was judged, and that it passed? The second process of a gate.

A decoder lives in the process that judges it, and whatever happens there, a report that is missing, half done, or short
of a test cannot be made to look complete by an exit status:

    pytest --pyargs pytest_emad.suites --emad-report report/
    emad verify report/ --require-suite all --require-decoder foreign

``emad compare``: two reports side by side, or the history of many, and an exit status that can gate a change.

    pytest suites --emad-report new/
    emad compare old/ new/ --fail-on verdict
    emad compare old/ new/ --markdown >> "$GITHUB_STEP_SUMMARY"

The status is 0 where nothing got worse, 1 where something did, 2 where a report cannot be compared: missing, damaged,
of a run that did not come to its end, or without anything that the other one has. What counts is chosen by
``--fail-on``, each word including those before it:

    never      nothing: the status says only whether the reports could be read
    gate       a row that gates survived and does not any more (or is gone), or is falsified and was not;
               a test of the suites broke, or passed and is left undecided by the decoder
    verdict    the same of any row that both reports have (the default)
    moved      an estimate, or a point's perplexity, moved for worse by more than both intervals allow
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emad_ref.cli.arguments import add_examples
from emad_ref.console import print_error
from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import require_writable_folder
from emad_ref.report.deselection import PREFIX, shipped_tests, suite_names
from emad_ref.report.schema import REPORT_FILE, Report, read_report, unfinished_since
from emad_ref.report.tiers import TIERS, tier_line
from emad_ref.report.verification import faults

if TYPE_CHECKING:
    from emad_ref.report.comparison import ReportChange, ReportComparison


def report(args: argparse.Namespace) -> None:
    """Write what shows one report.json, or several together: a document, a page, figures; or print its summary."""
    from emad_ref.report.comparison import changed_rows
    from emad_ref.report.page import write_pages
    from emad_ref.report.schema import read_report, read_reports

    if args.text:
        _print_summaries(args)
        return
    if args.out is None and len(args.folders) > 1:
        raise BadArgument(
            "out", None, "a folder", "pass --out DIR: the pages of several reports belong to none of them"
        )
    if args.against is not None and len(args.folders) > 1:
        raise BadArgument("against", args.against, "one report to compare with it", "name a single DIR")
    reports = read_reports(args.folders)
    changed = changed_rows(read_report(args.against), reports[0]) if args.against is not None else []
    out = args.out or args.folders[0]
    require_writable_folder(out, "out")
    written = write_pages(reports, out, changed)
    print(f"{out}: {written}")


def _print_summaries(args: argparse.Namespace) -> None:
    """The forty lines of each report, as wide as the terminal; 80 letters where there is none."""
    from emad_ref.report.schema import read_reports
    from emad_ref.report.summary import run_summary, summary_lines

    if args.out is not None:
        raise BadArgument("out", str(args.out), "nothing beside --text, which writes no file", "leave one of them out")
    width = shutil.get_terminal_size((80, 24)).columns
    for folder, found in zip(args.folders, read_reports(args.folders), strict=True):
        print("\n".join(line.text for line in summary_lines(run_summary(found), width, [f"report read from {folder}"])))


def report_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="written by pytest --emad-report")
    sub.add_argument("--text", action="store_true", help="print the summary, at most forty lines; write nothing")
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder to write; of a single report its own by default")
    sub.add_argument("--against", type=Path, metavar="REPORT",
                     help="an earlier report: the page shows what changed since, as emad compare says it")  # fmt: skip
    add_examples(
        sub,
        "emad report report/",
        "emad report runs/a runs/b --out pages/",
        "emad report report/ --against base/",
        "emad report report/ --text",
    )


ALL_SUITES = "all"
INCOMPLETE = 1  # exit status


def verify(args: argparse.Namespace) -> int:
    """Check that a report is whole and green: every test of the suites asked for, nothing undecided or left out."""
    report = read_report(args.report)
    if report["schema"] == 1:
        raise BadArgument("report", str(args.report), "schema 2", "schema 1 does not say which tests ran: run again")
    shipped = shipped_tests()
    suites = required_suites(args.require_suite, shipped)
    found = list(faults(report, suites, shipped, args.require_decoder, args.require_tier))
    if when := unfinished_since(args.report):
        found.insert(0, f"a run that began later ({when}) never told how it ended; this is not its report: run again")
    for fault in found:
        print_error(f"{args.report}: {fault}")
    if found:
        return INCOMPLETE
    passed = sum(entry["outcome"] == "passed" for entry in report["tests"])
    waivers = "".join(f"; waived {waiver['of']}: {waiver['reason']}" for waiver in report["waivers"])
    print(f"{args.report}: complete, {passed} tests passed; decoder: {report['decoder']['name']}{waivers}")
    if report["decoder"]["foreign"]:
        print(tier_line(report))
    return 0


def required_suites(names: Sequence[str], shipped: Sequence[str]) -> list[str]:
    """``suites/…`` for each suite named.

    Raises:
        BadArgument: there is no such suite, or this installation has none.
    """
    known = suite_names()
    if not shipped:
        raise BadArgument("--require-suite", ",".join(names), "installed suites", "install pytest-emad as a wheel")
    for name in names:
        if name not in (ALL_SUITES, *known):
            raise BadArgument("--require-suite", name, f"{ALL_SUITES}, or a comma list of {', '.join(known)}")
    return [PREFIX] if ALL_SUITES in names else [f"{PREFIX}/{name}" for name in names]


def verify_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the folder of --emad-report")
    sub.add_argument("--require-suite", type=_comma_list, default=(), metavar="NAMES",
                     help="all, or a comma list of suites that must have run, e.g. invariants,fidelity")  # fmt: skip
    sub.add_argument("--require-decoder", metavar="WHOSE", help="foreign, ours or the name of a plugin")
    sub.add_argument("--require-tier", choices=TIERS, metavar="TIER",
                     help=f"tier at which the decoder must have been judged: {', '.join(TIERS)}")  # fmt: skip
    add_examples(
        sub,
        "emad verify report/ --require-suite all --require-decoder foreign",
        "emad verify report/ --require-tier tokens",
    )


def _comma_list(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


GOT_WORSE, NOT_COMPARABLE = 1, 2  # exit statuses
WIDTH, MOST_LINES = 80, 40
GONE = "gone"

FAIL_ON: dict[str, Callable[[ReportChange], bool]] = {
    "never": lambda change: False,
    "gate": lambda change: change.gate and change.turn == "worse",
    "verdict": lambda change: change.turn == "worse",
    "moved": lambda change: "worse" in (change.turn, change.move),
}
# what is told one by one unless -v is given: heading → status
SHOWN_STATUSES = {
    "Worse": "worse",
    "Moved for worse": "moved for worse",
    "Better": "better",
    "Another verdict": "changed",
    "Moved": "moved",
    "Moved for the better": "moved for the better",
}
# and what is only named, or counted
NAMED_STATUSES = {"Only in the new report": "only new", "Only in the old report": "only old"}
COUNTED_STATUSES = {
    "The number of another leg": "another leg",
    "Another number, within chance": "within chance",
    "Another number, without intervals": "another number",
    "As before": "as before",
}


def compare(args: argparse.Namespace) -> int:
    """Compare reports: verdicts that changed, numbers that moved; exit status 1 where something got worse."""
    from emad_ref.report import comparison

    try:
        places = _report_places(args.reports)
        reports = [read_report(place) for place in places]
        for place, report in zip(places, reports, strict=True):
            comparison.require_complete(report, place)
    except EmadError as error:
        print_error(error)
        return NOT_COMPARABLE
    if len(reports) > 2:
        print("\n".join([*_history_lines(reports, args.markdown), "", "The last two:", ""]))
    found = comparison.compare_reports(*reports[-2:])
    failing = [change for change in found.changes if FAIL_ON[args.fail_on](change)]
    if not (found.compared or failing):
        alone = f"no claim, point or test of {places[-2]} is in {places[-1]} too"
        print_error(f"{alone}: nothing can be compared; run the same suites for both")
        return NOT_COMPARABLE
    shown = comparison_markdown(found, args.verbose) if args.markdown else comparison_text(found, args.verbose)
    print("\n".join([*shown, _exit_line(failing, args.fail_on)]))
    return GOT_WORSE if failing else 0


def _report_places(named: Sequence[Path]) -> list[Path]:
    """The reports named, or those in the folders below the only one, oldest first.

    Raises:
        BadArgument: fewer than two, or one twice.
        BadReport: one that cannot be read.
    """
    places = list(named)
    if len(named) == 1 and not (named[0] / REPORT_FILE).is_file():
        below = {path.parent: read_report(path) for path in named[0].glob(f"*/{REPORT_FILE}")}
        places = sorted(below, key=lambda place: str(below[place].get("run", {}).get("started", "")))
    if len(places) < 2 or len({place.resolve() for place in places}) < len(places):
        shown = ", ".join(map(str, places)) or str(named[0])
        raise BadArgument("REPORT", shown, "two reports or more, each once, or a folder of report folders")
    return places


def _history_lines(reports: Sequence[Report], markdown: bool) -> Iterator[str]:
    """A row per claim, oldest report first, for a terminal or as Markdown."""
    from tabulate import tabulate

    from emad_ref.report.comparison import history_rows, run_label
    from emad_ref.report.markdown import escape_markdown
    from emad_ref.report.tables import plain_table

    rows = history_rows(reports)
    yield f"{len(reports)} reports, from {run_label(reports[0])} to {run_label(reports[-1])}"
    yield ""
    if markdown:
        escaped = [{key: escape_markdown(text) for key, text in row.items()} for row in rows]
        yield tabulate(escaped, headers="keys", tablefmt="github", disable_numparse=True)
    else:
        yield plain_table(rows, WIDTH)


def _exit_line(failing: Sequence[ReportChange], fail_on: str) -> str:
    if fail_on == "never":
        return "Nothing fails: --fail-on never."
    rows = f"{len(failing)} row{'' if len(failing) == 1 else 's'}" if failing else "nothing"
    return f"{'Fails' if failing else 'Passes'} by --fail-on {fail_on}: {rows} got worse."


def _headline(found: ReportComparison) -> str:
    counts = {status: sum(change.status == status for change in found.changes) for status in _sections(every=True)}
    told = [f"{count} {status}" for status, count in counts.items() if count]
    tests = [f"{found.tests} test{'' if found.tests == 1 else 's'} as before"] if found.tests else []
    return ", ".join(told + tests)


def _sections(every: bool) -> dict[str, str]:
    """status → heading."""
    return {
        status: heading
        for heading, status in (SHOWN_STATUSES | (NAMED_STATUSES | COUNTED_STATUSES if every else {})).items()
    }


# ---------------------------------------------------------------- in a terminal


def comparison_text(found: ReportComparison, every: bool) -> list[str]:
    """At most ``MOST_LINES`` lines of ``WIDTH`` columns, the exit's own among them; ``every`` row without a limit."""
    unlike = _wrap(f"not like for like: {'; '.join(found.unlike)}", 0 if every else 3) if found.unlike else []
    head = [*_labels(found), *unlike, "", *_wrap(_headline(found))]
    named = [] if every else [line for sentence in _one_sided_lines(found) for line in _wrap(sentence, 2)]
    tail = ["", *named, *_wrap(_gates_line(found), 0 if every else 2)]
    room = MOST_LINES - len(head) - len(tail) - 1 - 1  # for what is left out, and the exit's line
    body: list[str] = []
    blocks = list(_blocks(found, every))
    for number, block in enumerate(blocks):
        if not every and len(body) + len(block) > room:
            body.append(f"… and {len(blocks) - number} rows more: -v")
            break
        body += block
    return [line.rstrip() for line in (*head, *body, *tail)]


def _labels(found: ReportComparison) -> Iterator[str]:
    for name, run in (("old", found.old), ("new", found.new)):
        yield _cut(f"{name}: {run}", "")


def _one_sided_lines(found: ReportComparison) -> Iterator[str]:
    """A line for the rows that one report alone has, and one for those of the other."""
    for heading, status in NAMED_STATUSES.items():
        names = [change.name for change in found.changes if change.status == status]
        if names:
            yield f"{heading}: {', '.join(names)}"


def _gates_line(found: ReportComparison) -> str:
    """How the rows stand that gate, whatever changed."""
    gates = [change for change in found.changes if change.gate and change.kind == "claim"]
    return f"Gates now: {', '.join(f'{gate.name} {gate.new.verdict or GONE}' for gate in gates) or 'none'}"


def _blocks(found: ReportComparison, every: bool) -> Iterator[list[str]]:
    """The lines of each row, those of a section's first row under its heading."""
    for status, heading in _sections(every).items():
        rows = [change for change in found.changes if change.status == status]
        for number, change in enumerate(rows):
            yield [*(["", heading] if number == 0 else []), *_change_lines(change, every)]


def _change_lines(change: ReportChange, every: bool) -> Iterator[str]:
    """What it is and its verdicts; its numbers; a note, in one line unless ``every`` is asked for."""
    model = f" on {change.model}" if change.model else ""
    yield _cut(f"  {change.title}{model}", f": {change.verdicts}" if change.verdicts else "")
    if change.numbers:
        yield from _wrap(f"    {change.numbers}")
    if change.note:
        yield from _wrap(f"    {change.note}", 0 if every else 1)


def _wrap(line: str, most: int = 0) -> list[str]:
    """``line`` in lines of the width, at ``most`` so many (0: all), the last of them then ends in "…"."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=indent,
        break_on_hyphens=False,
        max_lines=most or None,
        placeholder=" …",
    )


def _cut(line: str, end: str) -> str:
    """``line`` and ``end`` within the width: what is too long of ``line`` gives way."""
    room = WIDTH - len(end)
    return (line if len(line) <= room else f"{line[: room - 1]}…") + end


# ---------------------------------------------------------------- for a job summary


def comparison_markdown(found: ReportComparison, every: bool) -> list[str]:
    """A table as GitHub sets it, one row for each that is told; names and reasons stay text."""
    from tabulate import tabulate

    from emad_ref.report.markdown import escape_markdown

    unlike = f"- not like for like: {escape_markdown('; '.join(found.unlike))}"
    rows = [
        {key: escape_markdown(text) for key, text in change.row().items()}
        for status in _sections(every)
        for change in found.changes
        if change.status == status
    ]
    return [
        f"### emad compare: {escape_markdown(_headline(found))}",
        "",
        f"- old: {escape_markdown(found.old)}",
        f"- new: {escape_markdown(found.new)}",
        *([unlike] if found.unlike else []),
        "",
        *([tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True), ""] if rows else []),
        *([] if every else [f"{escape_markdown(line)}\n" for line in _one_sided_lines(found)]),
        f"{escape_markdown(_gates_line(found))}. \\* the row gates.",
        "",
    ]


def compare_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("reports", type=Path, nargs="+", metavar="REPORT",
                     help="two reports, the old one first; or more, or one folder of report folders: then also a "
                     "history of every claim, and the last two are compared")  # fmt: skip
    sub.add_argument("--fail-on", choices=FAIL_ON, default="verdict",
                     help="what makes the exit status 1: never; a gate that got worse; any verdict (default); "
                     "also numbers that moved for worse")  # fmt: skip
    sub.add_argument("--markdown", action="store_true", help='for a job summary: >> "$GITHUB_STEP_SUMMARY"')
    sub.add_argument("-v", "--verbose", action="store_true", help="every row, also those as before")
    add_examples(
        sub,
        "emad compare base/ report/",
        "emad compare nightly/",
        "emad compare base/ report/ --fail-on gate -v",
        'emad compare base/ report/ --markdown >> "$GITHUB_STEP_SUMMARY"',
    )
