"""Argument parsers of ``emad``: grouped help with examples, suggestions for misspelled words, ``--version``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from emad_ref.console import USAGE_ERROR
from emad_ref.errors import escape_unsafe, nearest_names
from emad_ref.files import is_folder
from pytest_emad.measurements.option_values import parse_number

SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")  # those of shtab
FILES = ("EXIT", "FILE", "OUT", "PROFILE", "REPORT")  # metavars with file completion
LIBRARIES = ("torch", "transformers", "lm-eval")
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,40}")
UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (--[\w-]+)")
PYTEST_OPTION = re.compile(r"(?<!pytest )--emad-([a-z]+(?:-[a-z]+)*)")
# option of pytest, without --emad- → its different name in a verb
OTHER_NAMES = {"tasks": ("--lm-eval-tasks",), "claims": ("--register",), "decoder-dtype": ("--other-dtype",)}
UNKNOWN_CHOICE = re.compile(r"invalid choice: '([^']*)'")


class GroupedFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that prints verbs under headings.

    The action of the verbs has an attribute ``groups``: heading → names of verbs.
    """

    def _format_action(self, action: argparse.Action) -> str:
        groups: Mapping[str, Sequence[str]] | None = getattr(action, "groups", None)
        if groups is None or not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        by_name = {choice.dest: choice for choice in action._choices_actions}
        parts = []
        for heading, verbs in groups.items():
            parts.append(f"{' ' * self._current_indent}{heading}:\n")
            self._indent()
            parts += [super(GroupedFormatter, self)._format_action(by_name[verb]) for verb in verbs]
            self._dedent()
        return "".join(parts)


class EmadParser(argparse.ArgumentParser):
    """Parser that suggests the nearest known word for an unknown one.

    ``argparse`` of Python 3.14 makes suggestions itself; then this class adds none.
    """

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": GroupedFormatter, **options})

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: VERB"):
            message += f"; {self.prog} --help lists them"
        nearest = None if "maybe you meant" in message else find_nearest_option(message, self)
        self.print_usage(sys.stderr)
        suggestion = f"; did you mean {nearest}?" if nearest else ""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}{suggestion}\n")


class VerbParser(EmadParser):
    """Parser of one verb. It reports unknown arguments itself, so the error shows and suggests this verb's options."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


class VersionAction(argparse.Action):
    """``--version``: prints the versions of emad and of the libraries that results depend on.

    It reads package metadata and imports no library.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        from emad_ref import __version__
        from pytest_emad.report.provenance import installed_version

        print(f"emad {__version__}")
        for library in LIBRARIES:
            print(f"{library} {installed_version(library) or 'is not installed'}")
        parser.exit()


class CompletionAction(argparse.Action):
    """``--print-completion SHELL``: prints a completion script of the parser, which only then imports shtab."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, dest, choices=SHELLS, **options)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, option: str | None = None) -> None:
        import shtab

        offers = dict.fromkeys(FILES, shtab.FILE) | {"DIR": shtab.DIRECTORY}
        for action in iterate_parser_actions(parser):
            if action.metavar in offers:
                action.complete = offers[action.metavar]  # type: ignore[attr-defined]  # shtab reads it
        print(shtab.complete(parser, shell))
        parser.exit()


def find_nearest_option(message: str, parser: argparse.ArgumentParser) -> str | None:
    """Option or choice of ``parser`` nearest to the unknown one in argparse's ``message``; None if none is near."""
    if match := UNKNOWN_OPTION.search(message):
        known: Iterable[str] = (option for action in iterate_parser_actions(parser) for option in action.option_strings)
    elif match := UNKNOWN_CHOICE.search(message):
        known = (str(choice) for action in parser._actions for choice in action.choices or ())
    else:
        return None
    return next(iter(nearest_names(match[1], known, 1)), None)


def iterate_parser_actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    """Actions of ``parser`` and of the parsers of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb_parser in action.choices.values():
                yield from iterate_parser_actions(verb_parser)


def pytest_to_verb_option_names(value: Any, arguments: Callable[[argparse.ArgumentParser], None]) -> Any:
    """``value`` (text or JSON) with pytest's option names replaced by those of the verb that ``arguments`` declares.

    Measurements name pytest's options, ``--emad-NAME``. An option that the verb lacks is marked as pytest's.
    """
    parser = argparse.ArgumentParser(add_help=False)
    arguments(parser)
    known = [option for action in iterate_parser_actions(parser) for option in action.option_strings]

    def own(found: re.Match[str]) -> str:
        names = (f"--{found[1]}", *OTHER_NAMES.get(found[1], ()))
        return next((name for name in names if name in known), f"{found[0]} of pytest")

    def renamed(part: Any) -> Any:
        if isinstance(part, str):
            return PYTEST_OPTION.sub(own, part)
        if isinstance(part, dict):
            return {key: renamed(each) for key, each in part.items()}
        return [renamed(each) for each in part] if isinstance(part, list | tuple) else part

    return renamed(value)


def parse_whole_number(text: str) -> int:
    """Type of an argument: a whole number in plain digits. ``int`` also reads 1_0, and the digits of any script."""
    if WHOLE_NUMBER.fullmatch(text.strip()) is None:
        raise argparse.ArgumentTypeError(f"{_shown(text)}, but expected a whole number in plain digits, e.g. 12")
    return int(text)


def parse_float_argument(text: str) -> float:
    """Type of an argument: a number in plain digits. NaN and infinity pass: ``cli.BOUNDS`` refuses them by name."""
    try:
        return parse_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shown(text)}, but expected a number in plain digits, e.g. 0.5") from None


def parse_path(text: str) -> Path:
    """Type of an argument: a path. A blank one, such as an unset variable, would be the current folder."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{_shown(text)}, but expected a path; name a file or a folder")
    return Path(text)


def parse_existing_folder(text: str) -> Path:
    """Type of an argument: an existing folder, since without the check text would come from the hub."""
    if not is_folder(parse_path(text)):
        raise argparse.ArgumentTypeError(
            f"{_shown(text)}, but expected an existing folder; looked at {parse_path(text)}"
        )
    return parse_path(text)


def _shown(text: str) -> str:
    return escape_unsafe(repr(text), 60)


def add_examples(parser: argparse.ArgumentParser, *lines: str) -> None:
    """Print the command lines ``lines`` as examples under the help of ``parser``."""
    parser.epilog = "\n".join(["examples:", *(f"  {line}" for line in lines)])


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    help = "folder with data sets, searched before the hub"
    parser.add_argument("--data", type=parse_existing_folder, metavar="DIR", help=help)


def add_resume_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", help="continue from OUT.checkpoint if an interrupted run left one"
    )


def add_worker_executor_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        default="here",
        metavar="WHERE",
        help="workers: here (this process), processes:N or dask://HOST:PORT (default: here)",
    )
