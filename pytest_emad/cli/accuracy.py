"""``emad accuracy BASE CANDIDATE``: whether the accuracy of a finished evaluation fell by more than a margin.

Exit status: 0 if the verdict is ``survived``, or ``inconclusive`` without ``--inconclusive fail``; 1 if it is
``falsified``, or ``inconclusive`` with it; 4 if the two cannot be compared. It needs no model, no GPU and no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from typing import TYPE_CHECKING

from emad_ref.files import require_replaceable_file, write_atomically
from pytest_emad.cli.arguments import add_examples, add_suite_option, parse_path, parse_whole_number
from pytest_emad.measurements.option_values import parse_number

if TYPE_CHECKING:
    from pytest_emad.accuracy.comparison import AccuracyComparison

FELL = 1  # exit status
LEAST_WIDTH = 60  # columns of a terminal
PAGE_START = rb"<title>Accuracy of two evaluations"


def compare_evaluations(args: argparse.Namespace) -> int:
    """Compare two finished evaluations item by item; exit status 1 if accuracy fell by more than the margin."""
    from pytest_emad.accuracy.comparison import compare_accuracy

    if args.html is not None:
        require_replaceable_file(args.html, "--html", "a page of an earlier comparison", PAGE_START)
    comparison = compare_accuracy(
        args.base,
        args.candidate,
        args.margin,
        tasks=args.task,
        metrics=args.metric,
        cluster=args.cluster,
        common_items=args.common_items,
        allow_changed_prompts=args.allow_changed_prompts,
    )
    if args.html is not None:
        from pytest_emad.accuracy.page import render_accuracy_page

        write_atomically(args.html, render_accuracy_page(comparison), "--html")
    print(_format(comparison, args))
    failing = ("falsified", "inconclusive") if args.inconclusive == "fail" else ("falsified",)
    return FELL if comparison.verdict in failing else 0


def _format(comparison: AccuracyComparison, args: argparse.Namespace) -> str:
    from pytest_emad.accuracy import summary

    if args.json:
        return json.dumps(comparison.to_json(args.items), indent=2)
    if args.markdown:
        return summary.format_comparison_pull_request(comparison, args.items)
    width = max(shutil.get_terminal_size((120, 24)).columns, LEAST_WIDTH)
    return summary.format_comparison_summary(comparison, width, args.items)


def parse_margin(text: str) -> float:
    """Type of an argument: ``1%`` or ``0.01``. A bare 1 may mean either, so numbers from 0.5 on need the sign."""
    number = text.strip().removesuffix("%")
    in_points = number != text.strip()
    try:
        value = parse_number(number.strip()) / (100 if in_points else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 0.5 or (value == 0.5 and not in_points):
        expected = "points such as 1%, at most 50%, or a fraction such as 0.01, below 0.5"
        raise argparse.ArgumentTypeError(f"{text!r:.60}, but expected {expected}")
    return value


def add_accuracy_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    of = (
        "lm_eval --log_samples folder, inspect_ai log (.eval, .json) or folder of logs, or .jsonl/.csv of task,id,score"
    )
    add("base", type=parse_path, metavar="BASE", help=f"evaluation to compare with: {of}")
    add("candidate", type=parse_path, metavar="CANDIDATE", help="evaluation to judge, of the same tool")
    add("--largest-drop", dest="margin", type=parse_margin, default=0.01, metavar="M",
        help="largest accepted drop, in points of accuracy: 1%% or 0.01 (default: 1%%)")  # fmt: skip
    add("--task", nargs="+", action="extend", default=[], metavar="T",
        help="tasks or groups to judge, by name or pattern (default: all)")  # fmt: skip
    add("--metric", nargs="+", action="extend", default=[], metavar="NAME",
        help="metrics to judge, by name or pattern (default: all with one number per item)")  # fmt: skip
    add("--cluster", default="", metavar="FIELD",
        help="field of the documents, of inspect_ai's metadata or of the table; items with one value of it depend on "
        "each other (default: repeats of one document do)")  # fmt: skip
    add("--common-items", action="store_true",
        help="judge what both sides have and count the rest, which ends the comparison otherwise")  # fmt: skip
    add("--allow-changed-prompts", action="store_true",
        help="pair items although their prompt or target changed, which ends the comparison otherwise")  # fmt: skip
    inconclusive = "what an inconclusive verdict does: warn, or fail with status 1 (default: warn)"
    add_suite_option(sub, "inconclusive", help=inconclusive)
    add("--items", type=parse_whole_number, default=10, metavar="N",
        help="how many lost and gained items to print (default: 10)")  # fmt: skip
    formats = sub.add_mutually_exclusive_group()
    formats.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request or job summary")
    formats.add_argument("--json", action="store_true", help="print JSON")
    add("--html", type=parse_path, metavar="FILE", help="write a page with every lost and gained item, up to 200")
    add_examples(
        sub,
        "emad accuracy results/base results/candidate",
        "emad accuracy results/base results/candidate --largest-drop 0.5% --task mmlu gsm8k --inconclusive fail",
        "emad accuracy logs/base.eval logs/candidate.eval --html drop.html",
        "emad accuracy base.csv candidate.csv --cluster paragraph --markdown",
        "emad accuracy results/base results/candidate --metric acc exact_match --common-items --items 20",
        "emad accuracy results/base results/candidate --allow-changed-prompts --json",
    )
