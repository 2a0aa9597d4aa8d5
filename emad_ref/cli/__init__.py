"""The command ``emad``: one function per verb, and one function that declares the verb's arguments.

The docstring of a verb's function is its help text. Bad input exits with status 1, in ``compare`` with 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from emad_ref.cli.arguments import CompletionAction, EmadParser, VerbParser, VersionAction, add_examples, own_options
from emad_ref.cli.calibration import (
    calibrate,
    calibrate_arguments,
    lens,
    lens_arguments,
    merge,
    merge_arguments,
    train,
    train_arguments,
)
from emad_ref.cli.downloads import fetch, fetch_arguments
from emad_ref.cli.generation import generate, generate_arguments, world, world_arguments
from emad_ref.cli.judgment import USAGE_ERROR, judge, judge_arguments, same, same_arguments
from emad_ref.cli.replay import replay, replay_arguments
from emad_ref.cli.reports import compare, compare_arguments, report, report_arguments, verify, verify_arguments
from emad_ref.cli.screening import screen, screen_arguments, sweep, sweep_arguments
from emad_ref.cli.server import serve, serve_arguments
from emad_ref.console import print_error, run_command
from emad_ref.errors import BadArgument, EmadError
from emad_ref.measurements.option_values import LARGEST_SEED, MOST, MOST_NATS
from emad_ref.models.names import require_available
from emad_ref.report.deselection import PAGES

Verb = Callable[[argparse.Namespace], int | None]  # exit status; None: 0
Arguments = Callable[[argparse.ArgumentParser], None]

READ_REPORTS = "read reports"
# heading of `emad --help` → its verbs
VERB_GROUPS: dict[str, tuple[tuple[Verb, Arguments], ...]] = {
    "judge a model or a decoder": ((judge, judge_arguments), (same, same_arguments), (serve, serve_arguments)),
    READ_REPORTS: (
        (report, report_arguments),
        (verify, verify_arguments),
        (compare, compare_arguments),
        (replay, replay_arguments),
    ),
    "calibrate and search exits": (
        (screen, screen_arguments),
        (sweep, sweep_arguments),
        (calibrate, calibrate_arguments),
        (merge, merge_arguments),
        (lens, lens_arguments),
    ),
    "print text": ((generate, generate_arguments), (world, world_arguments)),
    "get models": ((fetch, fetch_arguments), (train, train_arguments)),
}
VERBS = tuple(verb for group in VERB_GROUPS.values() for verb in group)

# Smallest and largest value of each numeric argument of any verb. A verb may check a narrower range itself, and
# ``ScreeningSettings`` checks ``rise``.
BOUNDS: dict[str, tuple[float, float]] = {
    "seed": (0, LARGEST_SEED),
    "tokens": (1, MOST),
    "documents": (1, MOST),
    "margin": (-MOST_NATS, MOST_NATS),
    "threshold": (0, MOST_NATS),  # no entropy is below 0: nothing would exit
    "entropy": (0, MOST_NATS),
    "divergence": (-MOST_NATS, MOST_NATS),  # a gate is linear: it may estimate less than 0
    "confidence": (0, 1),
    "steps": (1, MOST),
    "rate": (0, 1),
    "held_out": (1, MOST),
    "window": (1, MOST),
    "least_run": (1, MOST),
    "temperature": (0, 1000),
    "threads": (1, 4096),
    "connections": (1, MOST),
    "sessions": (1, MOST),
    "idle": (0.001, MOST),
}
ABOVE_SMALLEST = ("rate",)  # whose smallest value is excluded

MODEL_ARGUMENTS = ("model", "small_model", "large_model")


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of ``emad`` with all verbs."""
    pages = "".join(f"\nThe pages docs/… that messages name are in {folder}." for folder in PAGES if folder.is_dir())
    top = EmadParser(prog="emad", description=f"Adaptive-depth decoding on the command line.{pages}")
    top.add_argument("--version", action=VersionAction, help="print versions and exit")
    top.add_argument(
        "--print-completion", action=CompletionAction, help="print a completion script of this shell and exit"
    )
    add_examples(
        top,
        "emad --version",
        "emad --print-completion bash > ~/.local/share/bash-completion/completions/emad",
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs", parser_class=VerbParser)
    verbs.groups = {purpose: [run.__name__ for run, _ in group] for purpose, group in VERB_GROUPS.items()}  # type: ignore[attr-defined]  # GroupedFormatter reads it
    for run, arguments in VERBS:
        sub = verbs.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        sub.set_defaults(run=run)
        arguments(sub)
    return top


def require_bounded(args: argparse.Namespace) -> None:
    """Raise BadArgument if a number is not finite or lies outside ``BOUNDS``."""
    for name, (smallest, largest) in BOUNDS.items():
        value = getattr(args, name, None)
        excluded = name in ABOVE_SMALLEST and value == smallest
        if value is not None and (excluded or not smallest <= value <= largest):
            start = f"{'above' if name in ABOVE_SMALLEST else 'from'} {_number_text(smallest)}"
            raise BadArgument(name, value, f"a number {start} to {_number_text(largest)}")


def require_models(args: argparse.Namespace) -> None:
    """Check that every named model can be loaded, before torch and Transformers are imported.

    Raises:
        BadArgument, ModelUnavailable: as ``models.names.require_available``.
    """
    names = [getattr(args, name, None) for name in MODEL_ARGUMENTS]
    for name in (*names, *(getattr(args, "pair", None) or ())):
        if name is not None:
            require_available(name)


def _number_text(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``emad`` with ``argv`` (default: ``sys.argv[1:]``) and return the exit status."""
    return run_command(lambda: _run_verb(argv))


def _run_verb(argv: Sequence[str] | None) -> int | None:
    args = parser().parse_args(argv)
    try:
        require_bounded(args)
        if args.run is not fetch:
            require_models(args)
        status: int | None = args.run(args)
    except EmadError as error:
        if args.run in dict(VERB_GROUPS[READ_REPORTS]):  # of runs of pytest
            raise
        own_error = EmadError(own_options(str(error), dict(VERBS)[args.run]))
        if args.run not in (judge, same):  # their status 1 says that a gate failed
            raise own_error from error
        print_error(own_error)
        return USAGE_ERROR
    return status
