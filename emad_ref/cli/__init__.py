"""``emad``: train, calibrate, merge, judge, sweep, generate, report, verify, world.

One function per verb, its arguments beside it. Each prints what it did; bad input exits 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from emad_ref.cli.calibrating import calibrate, calibrate_arguments, merge, merge_arguments
from emad_ref.cli.generating import generate, generate_arguments, world, world_arguments
from emad_ref.cli.judging import judge, judge_arguments
from emad_ref.cli.reporting import report, report_arguments
from emad_ref.cli.sweeping import sweep, sweep_arguments
from emad_ref.cli.training import train, train_arguments
from emad_ref.cli.verifying import verify, verify_arguments
from emad_ref.errors import EmadError

Verb = Callable[[argparse.Namespace], int | None]  # exit status; None: 0
Arguments = Callable[[argparse.ArgumentParser], None]

VERBS: tuple[tuple[Verb, Arguments], ...] = (
    (train, train_arguments),
    (calibrate, calibrate_arguments),
    (merge, merge_arguments),
    (judge, judge_arguments),
    (sweep, sweep_arguments),
    (generate, generate_arguments),
    (report, report_arguments),
    (verify, verify_arguments),
    (world, world_arguments),
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="emad", description="Adaptive-depth decoding on the command line.")
    verbs = top.add_subparsers(dest="verb", required=True)
    for run, arguments in VERBS:
        sub = verbs.add_parser(run.__name__, help=run.__doc__)
        sub.set_defaults(run=run)
        arguments(sub)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except EmadError as error:
        print(f"emad: {error}", file=sys.stderr)
        return 1
