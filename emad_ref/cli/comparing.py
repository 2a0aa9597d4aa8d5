"""``emad compare``: two reports side by side, and an exit status for whoever gates a change on it.

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
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emad_ref.cli.parsing import examples
from emad_ref.console import complain
from emad_ref.errors import BadArgument, EmadError

if TYPE_CHECKING:  # tabulate and its tables: no verb pays for another's
    from emad_ref.report.comparing import Change, Comparison

WORSE, UNCOMPARABLE = 1, 2  # exit statuses
WIDTH, MOST_LINES = 80, 40
GONE = "gone"

FAIL_ON: dict[str, Callable[[Change], bool]] = {
    "never": lambda change: False,
    "gate": lambda change: change.gate and change.turn == "worse",
    "verdict": lambda change: change.turn == "worse",
    "moved": lambda change: "worse" in (change.turn, change.move),
}
# what is told one by one unless -v is given: heading → status
TOLD = {
    "Worse": "worse",
    "Moved for worse": "moved for worse",
    "Better": "better",
    "Another verdict": "changed",
    "Moved": "moved",
    "Moved for the better": "moved for the better",
}
# and what is only named, or counted
NAMED = {"Only in the new report": "only new", "Only in the old report": "only old"}
COUNTED = {
    "The number of another leg": "another leg",
    "Another number, within chance": "within chance",
    "Another number, without intervals": "another number",
    "As before": "as before",
}


def compare(args: argparse.Namespace) -> int:
    """Compare two reports: verdicts that changed, numbers that moved; exit status 1 where something got worse."""
    from emad_ref.report import comparing
    from emad_ref.report.reading import read_report

    try:
        if args.old.resolve() == args.new.resolve():
            raise BadArgument("B", str(args.new), "another report than A")
        reports = [read_report(place) for place in (args.old, args.new)]
        for place, report in zip((args.old, args.new), reports, strict=True):
            comparing.require_complete(report, place)
    except EmadError as error:
        complain(error)
        return UNCOMPARABLE
    found = comparing.compare(*reports)
    failing = [change for change in found.changes if FAIL_ON[args.fail_on](change)]
    if not (found.compared or failing):
        alone = f"no claim, point or test of {args.old} is in {args.new} too"
        complain(f"{alone}: nothing can be compared; run the same suites for both")
        return UNCOMPARABLE
    shown = markdown(found, args.verbose) if args.markdown else text(found, args.verbose)
    print("\n".join([*shown, _said(failing, args.fail_on)]))
    return WORSE if failing else 0


def _said(failing: Sequence[Change], fail_on: str) -> str:
    if fail_on == "never":
        return "Nothing fails: --fail-on never."
    rows = f"{len(failing)} row{'' if len(failing) == 1 else 's'}" if failing else "nothing"
    return f"{'Fails' if failing else 'Passes'} by --fail-on {fail_on}: {rows} got worse."


def _headline(found: Comparison) -> str:
    counts = {status: sum(change.status == status for change in found.changes) for status in _sections(every=True)}
    told = [f"{count} {status}" for status, count in counts.items() if count]
    tests = [f"{found.tests} test{'' if found.tests == 1 else 's'} as before"] if found.tests else []
    return ", ".join(told + tests)


def _sections(every: bool) -> dict[str, str]:
    """status → heading."""
    return {status: heading for heading, status in (TOLD | (NAMED | COUNTED if every else {})).items()}


# ---------------------------------------------------------------- in a terminal


def text(found: Comparison, every: bool) -> list[str]:
    """At most ``MOST_LINES`` lines of ``WIDTH`` columns, the exit's own among them; ``every`` row without a limit."""
    unlike = _wrapped(f"not like for like: {'; '.join(found.unlike)}", 0 if every else 3) if found.unlike else []
    head = [*_labels(found), *unlike, "", *_wrapped(_headline(found))]
    named = [] if every else [line for sentence in _one_sided(found) for line in _wrapped(sentence, 2)]
    tail = ["", *named, *_wrapped(_gates(found), 0 if every else 2)]
    room = MOST_LINES - len(head) - len(tail) - 1 - 1  # for what is left out, and the exit's line
    body: list[str] = []
    blocks = list(_blocks(found, every))
    for number, block in enumerate(blocks):
        if not every and len(body) + len(block) > room:
            body.append(f"… and {len(blocks) - number} rows more: -v")
            break
        body += block
    return [line.rstrip() for line in (*head, *body, *tail)]


def _labels(found: Comparison) -> Iterator[str]:
    for name, run in (("old", found.old), ("new", found.new)):
        yield _cut(f"{name}: {run}", "")


def _one_sided(found: Comparison) -> Iterator[str]:
    """A line for the rows that one report alone has, and one for those of the other."""
    for heading, status in NAMED.items():
        names = [change.name for change in found.changes if change.status == status]
        if names:
            yield f"{heading}: {', '.join(names)}"


def _gates(found: Comparison) -> str:
    """How the rows stand that gate, whatever changed."""
    gates = [change for change in found.changes if change.gate and change.kind == "claim"]
    return f"Gates now: {', '.join(f'{gate.name} {gate.new.verdict or GONE}' for gate in gates) or 'none'}"


def _blocks(found: Comparison, every: bool) -> Iterator[list[str]]:
    """The lines of each row, those of a section's first row under its heading."""
    for status, heading in _sections(every).items():
        rows = [change for change in found.changes if change.status == status]
        for number, change in enumerate(rows):
            yield [*(["", heading] if number == 0 else []), *_row(change, every)]


def _row(change: Change, every: bool) -> Iterator[str]:
    """What it is and its verdicts; its numbers; a note, in one line unless ``every`` is asked for."""
    model = f" on {change.model}" if change.model else ""
    yield _cut(f"  {change.title}{model}", f": {change.verdicts}" if change.verdicts else "")
    if change.numbers:
        yield from _wrapped(f"    {change.numbers}")
    if change.note:
        yield from _wrapped(f"    {change.note}", 0 if every else 1)


def _wrapped(line: str, most: int = 0) -> list[str]:
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


def markdown(found: Comparison, every: bool) -> list[str]:
    """A table as GitHub sets it, one row for each that is told; names and reasons stay text."""
    from tabulate import tabulate

    from emad_ref.report.document import escaped

    unlike = f"- not like for like: {escaped('; '.join(found.unlike))}"
    rows = [
        {key: escaped(text) for key, text in change.row().items()}
        for status in _sections(every)
        for change in found.changes
        if change.status == status
    ]
    return [
        f"### emad compare: {escaped(_headline(found))}",
        "",
        f"- old: {escaped(found.old)}",
        f"- new: {escaped(found.new)}",
        *([unlike] if found.unlike else []),
        "",
        *([tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True), ""] if rows else []),
        *([] if every else [f"{escaped(line)}\n" for line in _one_sided(found)]),
        f"{escaped(_gates(found))}. \\* the row gates.",
        "",
    ]


def compare_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("old", type=Path, metavar="A", help="report.json, or the folder of --emad-report, e.g. base/")
    sub.add_argument("new", type=Path, metavar="B", help="what is held against it, e.g. report/")
    sub.add_argument("--fail-on", choices=FAIL_ON, default="verdict",
                     help="what makes the exit status 1: never; a gate that got worse; any verdict (default); "
                     "also numbers that moved for worse")  # fmt: skip
    sub.add_argument("--markdown", action="store_true", help='for a job summary: >> "$GITHUB_STEP_SUMMARY"')
    sub.add_argument("-v", "--verbose", action="store_true", help="every row, also those as before")
    examples(
        sub,
        "emad compare base/ report/",
        "emad compare base/ report/ --fail-on gate -v",
        'emad compare base/ report/ --markdown >> "$GITHUB_STEP_SUMMARY"',
    )
