"""What every parser of ``emad`` has: examples under its help, the nearest match to what it does not know, versions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

LIBRARIES = ("torch", "transformers", "lm-eval")
UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (--[\w-]+)")
UNKNOWN_CHOICE = re.compile(r"invalid choice: '([^']*)'")


class GroupedFormatter(argparse.RawDescriptionHelpFormatter):
    """Help whose verbs stand under the headings of ``groups``, an attribute of their action: heading → verbs."""

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
    """``argparse`` of 3.14 suggests by itself; where it has, nothing is added."""

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": GroupedFormatter, **options})

    def error(self, message: str) -> NoReturn:
        meant = None if "maybe you meant" in message else nearest_known(message, self)
        super().error(message + (f"; did you mean {meant}?" if meant else ""))


class VerbParser(EmadParser):
    """Of one verb: what it does not know it refuses itself, with its own usage and its own options to suggest."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


class VersionAction(argparse.Action):
    """``--version``: ours, and of the libraries that results depend on, from their metadata: nothing is imported."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        from emad_ref import __version__

        print(f"emad {__version__}")
        for library in LIBRARIES:
            try:
                print(f"{library} {version(library)}")
            except PackageNotFoundError:
                print(f"{library} is not installed")
        parser.exit()


def nearest_known(message: str, parser: argparse.ArgumentParser) -> str | None:
    """The option or choice of ``parser`` or its verbs that is most like the unknown one in argparse's ``message``."""
    if found := UNKNOWN_OPTION.search(message):
        known: Iterable[str] = (option for action in all_actions(parser) for option in action.option_strings)
    elif found := UNKNOWN_CHOICE.search(message):
        known = (str(choice) for action in parser._actions for choice in action.choices or ())
    else:
        return None
    return next(iter(get_close_matches(found[1], [*known], n=1)), None)


def all_actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    """Of a parser and of every parser below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from all_actions(below)


def add_examples(parser: argparse.ArgumentParser, *lines: str) -> None:
    """Show command lines, as they are typed, under the parser's help."""
    parser.epilog = "\n".join(["examples:", *(f"  {line}" for line in lines)])


def add_executor(parser: argparse.ArgumentParser) -> None:
    """Who does the long part."""
    parser.add_argument(
        "--executor",
        default="here",
        metavar="WHERE",
        help="who does the work: here, the default, processes:N, dask://HOST:PORT or slurm://FOLDER",
    )
