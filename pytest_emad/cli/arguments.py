"""Argument parsers of ``emad``: grouped help with examples, suggestions for misspelled words, ``--version``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from emad_ref.console import USAGE_ERROR
from emad_ref.errors import BadArgument, EmadError, escape_unsafe, is_number, nearest_names, suggest_nearest
from pytest_emad.measurements.option_values import MOST, MOST_NATS, parse_number
from pytest_emad.run.option_table import OPTIONS

SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")  # those of shtab
FILES = ("EXIT", "FILE", "OUT", "PROFILE", "REPORT")  # metavars with file completion
LIBRARIES = ("torch", "transformers", "lm-eval")
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,40}")
UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (--[\w-]+)")
PYTEST_OPTION = re.compile(r"(?<!pytest )--emad-([a-z]+(?:-[a-z]+)*)")
UNKNOWN_VERB = re.compile(r"invalid choice: '([^']*)'")


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
    """Parser that suggests the nearest known word for an unknown one, and refuses all bad values at once.

    ``argparse`` of Python 3.14 makes suggestions itself; then this class adds none.
    """

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": GroupedFormatter, **options})
        self.refusals: list[str] = []

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            value = super()._get_value(action, arg_string)
            require_number_in_bounds(action, value)
            require_known_choice(action, value)
        except (argparse.ArgumentError, BadArgument) as error:
            self.refusals.append(_refusal_text(action, error))
            return next(iter(action.choices or ()), None)  # a stand-in that argparse takes: parsing fails at its end
        return value

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: VERB"):
            message += f"; {self.prog} --help lists them"
        nearest = None if "maybe you meant" in message else find_nearest_option(message, self)
        self.print_usage(sys.stderr)
        said = [*self.refusals, f"{message}; did you mean {nearest}?" if nearest else message]
        self.exit(USAGE_ERROR, "".join(f"{self.prog}: error: {line}\n" for line in said))


class VerbParser(EmadParser):
    """Parser of one verb. It reports unknown arguments itself, so the error shows and suggests this verb's options.

    A verb with a default for ``pytest_arguments`` takes the words after ``--`` as those.

    Raises:
        EmadError: values that the verb's options refuse, all of them in one message.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.refusals, rest = [], []
        if "--" in args and "pytest_arguments" in self._defaults:
            place = args.index("--")
            args, rest = args[:place], args[place + 1 :]
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if self.refusals:
            raise EmadError("\n".join(self.refusals))
        if rest:
            parsed.pytest_arguments = rest
        return parsed, unknown


DEFAULT_TEXT = re.compile(r" \(default: [^()]*\)$")  # of a help text
# Smallest and largest value of each numeric argument of any verb, by its attribute in the result
BOUNDS: dict[str, tuple[float, float]] = {
    "documents": (1, MOST),
    "threshold": (0, MOST_NATS),  # no entropy is below 0, so no token would exit
    "entropy": (0, MOST_NATS),
    "divergence": (-MOST_NATS, MOST_NATS),  # a gate is linear and may estimate less than 0
    "confidence": (0, 1),
    "steps": (1, MOST),
    "rate": (0, 1),
    "held_out": (1, MOST),
    "window": (1, MOST),
    "entropy_window": (1, MOST),
    "least_run": (1, MOST),
    "temperature": (0, 1000),
    "threads": (1, 4096),
    "connections": (1, MOST),
    "sessions": (1, MOST),
    "positions": (1, MOST),
    "tokens": (1, MOST),
    "max_new_tokens": (1, MOST),
    "items": (0, MOST),
    "idle": (0.001, MOST),
}
ABOVE_SMALLEST = ("rate",)  # arguments with an excluded smallest value


def require_number_in_bounds(action: argparse.Action, value: Any) -> None:
    """Raise BadArgument if a number is not finite or lies outside ``BOUNDS``."""
    if action.dest not in BOUNDS or not is_number(value):
        return
    smallest, largest = BOUNDS[action.dest]
    excluded = action.dest in ABOVE_SMALLEST and value == smallest
    if excluded or not smallest <= value <= largest:
        start = f"{'above' if action.dest in ABOVE_SMALLEST else 'from'} {_number_text(smallest)}"
        raise BadArgument(_argument_name(action), value, f"a number {start} to {_number_text(largest)}")


def require_known_choice(action: argparse.Action, value: Any) -> None:
    """Raise BadArgument unless ``value`` is one of the choices, if the argument has some."""
    if action.choices is None or isinstance(action, argparse._SubParsersAction) or value in action.choices:
        return
    known = [str(choice) for choice in action.choices]
    raise BadArgument(_argument_name(action), value, f"one of {', '.join(known)}", suggest_nearest(str(value), known))


def _number_text(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def _argument_name(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def _refusal_text(action: argparse.Action, error: Exception) -> str:
    """``NAME='value', but expected …``, in the form of ``BadArgument``, whose message has the name already."""
    said, name = str(getattr(error, "message", error)), _argument_name(action)
    return said if said.startswith(f"{name}=") else f"{name}={said}"


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
    elif match := UNKNOWN_VERB.search(message):
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


def pytest_to_verb_option_names(text: str, arguments: Callable[[argparse.ArgumentParser], None]) -> str:
    """``text`` with pytest's option names replaced by those of the verb that ``arguments`` declares.

    Measurements name pytest's options, ``--emad-NAME``. An option that the verb lacks is marked as pytest's.
    """
    parser = argparse.ArgumentParser(add_help=False)
    arguments(parser)
    known = [option for action in iterate_parser_actions(parser) for option in action.option_strings]

    def own(found: re.Match[str]) -> str:
        return f"--{found[1]}" if f"--{found[1]}" in known else f"{found[0]} of pytest"

    return PYTEST_OPTION.sub(own, text)


def parse_whole_number(text: str) -> int:
    """Type of an argument: a whole number in plain digits. ``int`` also reads 1_0, and the digits of any script."""
    if WHOLE_NUMBER.fullmatch(text.strip()) is None:
        raise argparse.ArgumentTypeError(f"{_shown(text)}, but expected a whole number in plain digits, e.g. 12")
    return int(text)


def parse_float_argument(text: str) -> float:
    """Type of an argument: a number in plain digits. NaN and infinity pass: ``BOUNDS`` refuses them by name."""
    try:
        return parse_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shown(text)}, but expected a number in plain digits, e.g. 0.5") from None


def parse_path(text: str) -> Path:
    """Type of an argument: a path. A blank one, such as an unset variable, would be the current folder."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{_shown(text)}, but expected a path; name a file or a folder")
    return Path(text)


def _shown(text: str) -> str:
    return escape_unsafe(repr(text), 60)


def add_examples(parser: argparse.ArgumentParser, *lines: str) -> None:
    """Print the command lines ``lines`` as examples under the help of ``parser``."""
    parser.epilog = "\n".join(["examples:", *(f"  {line}" for line in lines)])


def make_option_parser(
    read: Callable[[str, Path, str], Any], where: str, *, as_text: bool = False
) -> Callable[[str], Any]:
    """Type of an argument from a reader of ``option_values``; ``as_text``: the value is checked and stays text."""

    def parse(text: str) -> Any:
        try:
            value = read(text, Path.cwd(), where)
        except BadArgument as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text if as_text else value

    return parse


def add_suite_option(
    parser: argparse._ActionsContainer, name: str, about: str = "", *, as_text: bool = False, **settings: Any
) -> None:
    """Declare ``--NAME``, which means what pytest's ``--emad-NAME`` means.

    ``about``: what it means for this verb in addition; ``settings`` override those of ``add_argument``.
    ``as_text``: values are checked and stay text, for pytest to read, and an option that is not given is None.
    """
    option = next(option for option in OPTIONS if option.name == name)
    help = option.help.replace("--emad-", "--")
    if "default" in settings:
        help = DEFAULT_TEXT.sub(f" (default: {settings['default']})" if settings["default"] else "", help)
    own: dict[str, Any] = {
        "help": help + (f"; {about}" if about else ""),
        "default": None if as_text else option.default,
    }
    own |= option.value_settings
    if not option.switch:
        own["type"] = make_option_parser(option.read, f"--{name}", as_text=as_text)
        own |= {"choices": option.choices} if option.choices else {}
    parser.add_argument(f"--{name}", **(own | settings))


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
