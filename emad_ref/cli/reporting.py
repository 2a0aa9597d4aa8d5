"""``emad report``: the pages of one report folder, or of several together, made from report.json alone.

emad report out              # writes the pages into out
emad report out --text       # prints the summary that the run printed
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from emad_ref.cli.parsing import examples
from emad_ref.errors import BadArgument
from emad_ref.files import require_writable_folder


def report(args: argparse.Namespace) -> None:
    """Write what shows one report.json, or several together: a document, a page, figures; or print its summary."""
    from emad_ref.report.comparing import changes
    from emad_ref.report.folder import write_pages
    from emad_ref.report.reading import read_report, read_reports

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
    changed = changes(read_report(args.against), reports[0]) if args.against is not None else []
    out = args.out or args.folders[0]
    require_writable_folder(out, "out")
    written = write_pages(reports, out, changed)
    print(f"{out}: {written}")


def _print_summaries(args: argparse.Namespace) -> None:
    """The forty lines of each report, as wide as the terminal; 80 letters where there is none."""
    from emad_ref.report.brief import brief
    from emad_ref.report.brieftext import lines
    from emad_ref.report.reading import read_reports

    if args.out is not None:
        raise BadArgument("out", str(args.out), "nothing beside --text, which writes no file", "leave one of them out")
    width = shutil.get_terminal_size((80, 24)).columns
    for folder, found in zip(args.folders, read_reports(args.folders), strict=True):
        print("\n".join(line.text for line in lines(brief(found), width, [f"report read from {folder}"])))


def report_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="written by pytest --emad-report")
    sub.add_argument("--text", action="store_true", help="print the summary, at most forty lines; write nothing")
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder to write; of a single report its own by default")
    sub.add_argument("--against", type=Path, metavar="REPORT",
                     help="an earlier report: the page shows what changed since, as emad compare says it")  # fmt: skip
    examples(
        sub,
        "emad report report/",
        "emad report runs/a runs/b --out pages/",
        "emad report report/ --against base/",
        "emad report report/ --text",
    )
