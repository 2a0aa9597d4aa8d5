"""``python -m pytest_emad.lm_eval …``: ``python -m lm_eval …`` with ``emad`` among its models.

lm-eval 0.4.13 finds models only in its own registry, without entry points or a path option. So this module imports
``emad`` before lm-eval's command runs, and adds missing defaults: ``--model emad``, ``--device cpu`` (lm-eval's default
is cuda:0) and task files that read local data (``pytest_emad/tasks/local``). It adds nothing with ``--config`` or for
other subcommands.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb

from emad_ref.console import USAGE_ERROR, print_error, run_cli_command
from emad_ref.errors import BadArgument, EmadError, MissingExtra, require_extra
from emad_ref.files import require_writable
from pytest_emad.tasks.lm_eval_settings import TASK_FOLDER

DEFAULT_OPTIONS = {  # all spellings of an option → its default
    ("--model", "-M"): "emad",
    ("--device",): "cpu",
    ("--include_path",): str(TASK_FOLDER),
}
OTHER_COMMANDS = ("ls", "validate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run lm-eval's command on ``argv``, by default this process's.

    Returns ``USAGE_ERROR`` for a refused argument of ``emad``.
    """
    try:
        require_extra("lm-eval's command", "lm_eval")
    except MissingExtra as error:
        print_error(error)
        return USAGE_ERROR
    from lm_eval.__main__ import cli_evaluate

    import pytest_emad.tasks.lm_eval_model  # noqa: F401  # registers `emad`

    argv = sys.argv[1:] if argv is None else argv
    before = sys.argv
    sys.argv = ["lm_eval", *add_default_options(argv)]  # the only variable that lm-eval reads
    try:
        require_usable_options(argv)
        cli_evaluate()
    except EmadError as error:
        print_error(error)
        return USAGE_ERROR
    except (ValueError, TypeError, OSError) as error:  # TypeError: one argument in --model_args and as an option
        if not _raised_by_lm_eval(error):
            raise
        print_error(f"lm_eval: {error!r}")
        return USAGE_ERROR
    finally:
        sys.argv = before
    return 0


def require_usable_options(argv: Sequence[str]) -> None:
    """Refuse an unwritable ``--output_path``, of which lm-eval only warns at the end, and a ``--limit`` without
    documents.

    Raises:
        BadFile: as ``require_writable``.
        BadArgument: a limit that is no finite number above 0.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_path", "-o", nargs="?")  # lm-eval's own parser reports a missing value
    parser.add_argument("--limit", "-L", nargs="?", type=float)
    options = parser.parse_known_args(argv)[0]
    if options.limit is not None and not 0 < options.limit < math.inf:
        expected = "a number of documents per task, or a share of them below 1, above 0"
        raise BadArgument("--limit", options.limit, expected, "leave it out to take all")
    if path := options.output_path:
        require_writable(Path(path) if path.endswith(".json") else Path(path) / "results", "--output_path")


def _raised_by_lm_eval(error: BaseException) -> bool:
    """Whether lm-eval itself raised the error, so that its message suffices without frames."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "lm_eval"


def add_default_options(argv: Sequence[str]) -> list[str]:
    """``argv`` with the default of each option that it omits.

    >>> add_default_options(["--tasks", "world_recall", "--device=cuda"])[:3]
    ['--tasks', 'world_recall', '--device=cuda']
    >>> add_default_options(["ls", "tasks"])
    ['ls', 'tasks']
    """
    given = {word.partition("=")[0] for word in argv}
    if not argv or argv[0] in OTHER_COMMANDS or given & {"--config", "-C", "-h", "--help"}:
        return [*argv]
    added = [word for names, value in DEFAULT_OPTIONS.items() if not given & {*names} for word in (names[0], value)]
    return [*argv, *added]


if __name__ == "__main__":
    sys.exit(run_cli_command(main))
