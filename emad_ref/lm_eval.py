"""``python -m emad_ref.lm_eval …``: ``python -m lm_eval …`` with ``emad`` among its models.

lm-eval 0.4.13 looks for models in its own registry alone: it has neither entry points nor a path to give, so somebody
has to import ours before its command runs. That is all this does, and where the command does not say it, it fills in
what a run of ours would repeat each time: ``--model emad``, ``--device cpu`` (lm-eval asks for cuda:0) and task files
that read local data (``emad_ref/tasks/local``). With ``--config``, and of other subcommands, nothing is added.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb

from emad_ref.console import print_error, run_cli_command
from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import require_writable
from emad_ref.tasks.lm_eval_settings import TASK_FOLDER

DEFAULT_OPTIONS = {  # every spelling of an option, and what it is given where none of them stands
    ("--model", "-M"): "emad",
    ("--device",): "cpu",
    ("--include_path",): str(TASK_FOLDER),
}
OTHER_COMMANDS = ("ls", "validate")
MISSING = "emad: lm_eval is not installed; pip install 'pytest-emad[tasks]'"


def main(argv: Sequence[str] | None = None) -> int:
    """lm-eval's command on ``argv``, by default this process's; 1 where an argument of ours is refused."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError:
        print(MISSING, file=sys.stderr)
        return 1
    import emad_ref.tasks.lm_eval_model  # noqa: F401  # registers `emad`

    argv = sys.argv[1:] if argv is None else argv
    before = sys.argv
    sys.argv = ["lm_eval", *add_default_options(argv)]  # lm-eval reads nothing else
    try:
        require_usable_options(argv)
        cli_evaluate()
    except EmadError as error:
        print_error(error)
        return 1
    except (ValueError, TypeError, OSError) as error:  # TypeError: one argument in --model_args and as an option
        if not _raised_by_lm_eval(error):
            raise
        print_error(f"lm_eval: {error!r}")
        return 1
    finally:
        sys.argv = before
    return 0


def require_usable_options(argv: Sequence[str]) -> None:
    """Refuse what lm-eval finds out late: an ``--output_path`` in which it cannot write, of which it warns at the end
    with status 0, and a ``--limit`` that leaves no document.

    Raises:
        BadFile: as ``require_writable``.
        BadArgument: a limit that is no finite number above 0.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_path", "-o", nargs="?")  # without a value, lm-eval's own parser says so
    parser.add_argument("--limit", "-L", nargs="?", type=float)
    options = parser.parse_known_args(argv)[0]
    if options.limit is not None and not 0 < options.limit < math.inf:
        expected = "a number of documents per task, or a share of them below 1, above 0"
        raise BadArgument("--limit", options.limit, expected, "leave it out to take all")
    if path := options.output_path:
        require_writable(Path(path) if path.endswith(".json") else Path(path) / "results", "--output_path")


def _raised_by_lm_eval(error: BaseException) -> bool:
    """Whether lm-eval itself refuses something: then its sentence is enough, and frames of its code are not."""
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
