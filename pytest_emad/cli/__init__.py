"""The command ``emad``: one function per verb, and one function that declares the verb's arguments.

The docstring of a verb's function is its help text. docs/command-line.md lists the exit statuses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from emad_ref.console import run_cli_command
from emad_ref.errors import EmadError
from emad_ref.models.names import require_weights_available
from pytest_emad.cli.accuracy import add_accuracy_arguments, compare_evaluations
from pytest_emad.cli.arguments import (
    CompletionAction,
    EmadParser,
    VerbParser,
    VersionAction,
    add_examples,
    pytest_to_verb_option_names,
)
from pytest_emad.cli.calibration import (
    add_calibrate_arguments,
    add_lens_arguments,
    add_merge_arguments,
    add_train_arguments,
    calibrate,
    fit_tuned_lens,
    merge_profile_files,
    train_bundled_model,
)
from pytest_emad.cli.downloads import add_fetch_arguments, fetch_model
from pytest_emad.cli.generation import (
    add_generate_arguments,
    add_print_corpus_arguments,
    generate,
    print_corpus_documents,
)
from pytest_emad.cli.judgment import add_judge_arguments, add_same_arguments, compare_models, judge
from pytest_emad.cli.replay import add_replay_arguments, replay_test
from pytest_emad.cli.reports import (
    add_compare_arguments,
    add_report_arguments,
    add_verify_arguments,
    compare,
    verify_report_complete_and_passed,
    write_report_pages,
)
from pytest_emad.cli.screening import (
    add_screen_arguments,
    add_sweep_arguments,
    screen_and_save_best_exit,
    sweep_exit_rules,
)
from pytest_emad.cli.server import add_serve_arguments, serve_decoder_over_wire_protocol
from pytest_emad.report.deselection import PAGES

Verb = Callable[[argparse.Namespace], int | None]  # exit status; None: 0
Arguments = Callable[[argparse.ArgumentParser], None]

READ_REPORTS = "read reports"
COMPARE_EVALUATIONS = "compare finished evaluations"
# heading of `emad --help` → its verbs, each with its function and the function that declares its arguments
VERB_GROUPS: dict[str, dict[str, tuple[Verb, Arguments]]] = {
    "judge a model or a decoder": {
        "judge": (judge, add_judge_arguments),
        "same": (compare_models, add_same_arguments),
        "serve": (serve_decoder_over_wire_protocol, add_serve_arguments),
    },
    COMPARE_EVALUATIONS: {
        "accuracy": (compare_evaluations, add_accuracy_arguments),
    },
    READ_REPORTS: {
        "report": (write_report_pages, add_report_arguments),
        "verify": (verify_report_complete_and_passed, add_verify_arguments),
        "compare": (compare, add_compare_arguments),
        "replay": (replay_test, add_replay_arguments),
    },
    "calibrate and search exits": {
        "screen": (screen_and_save_best_exit, add_screen_arguments),
        "sweep": (sweep_exit_rules, add_sweep_arguments),
        "calibrate": (calibrate, add_calibrate_arguments),
        "merge": (merge_profile_files, add_merge_arguments),
        "lens": (fit_tuned_lens, add_lens_arguments),
    },
    "print text": {
        "generate": (generate, add_generate_arguments),
        "world": (print_corpus_documents, add_print_corpus_arguments),
    },
    "get models": {
        "fetch": (fetch_model, add_fetch_arguments),
        "train": (train_bundled_model, add_train_arguments),
    },
}
VERBS = {name: verb for group in VERB_GROUPS.values() for name, verb in group.items()}

MODEL_ARGUMENTS = ("model", "small_model", "large_model")


def build_parser() -> argparse.ArgumentParser:
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
    verbs.groups = {purpose: list(group) for purpose, group in VERB_GROUPS.items()}  # type: ignore[attr-defined]  # GroupedFormatter reads it
    for name, (run, add_arguments) in VERBS.items():
        add_arguments(verbs.add_parser(name, help=run.__doc__, description=run.__doc__))
    return top


def require_loadable_models(args: argparse.Namespace) -> None:
    """Check that every named model can be loaded, before torch and Transformers are imported.

    Raises:
        BadArgument, ModelUnavailable: as ``models.names.require_weights_available``.
    """
    names = [getattr(args, name, None) for name in MODEL_ARGUMENTS]
    for name in (*names, *(getattr(args, "pair", None) or ())):
        if name is not None:
            require_weights_available(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``emad`` with ``argv`` (default: ``sys.argv[1:]``) and return the exit status."""
    return run_cli_command(lambda: _run_verb(argv))


def _run_verb(argv: Sequence[str] | None) -> int | None:
    args = build_parser().parse_args(argv)
    run, add_arguments = VERBS[args.verb]
    try:
        if args.verb not in ("fetch", "judge"):  # pytest checks those of judge
            require_loadable_models(args)
        status: int | None = run(args)
    except EmadError as error:
        if args.verb in (*VERB_GROUPS[READ_REPORTS], *VERB_GROUPS[COMPARE_EVALUATIONS]):  # pytest's options, or none
            raise
        raise EmadError(pytest_to_verb_option_names(str(error), add_arguments)) from error
    return status
