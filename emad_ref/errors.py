"""Exceptions, and checks of values and printable text.

Each message names the argument, its value, what was expected and what to do about it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import takewhile
from numbers import Integral, Real
from typing import TypeGuard, TypeVar

T = TypeVar("T")

ENDS_ALIKE = 0.8  # ratio of a name that ends with the word
NEAR = 0.6  # difflib's ratio from which two names count as similar, its default
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_LINE_BREAK = re.compile(r"\s*\n\s*")
LONGEST_MESSAGE, LONGEST_VALUE = 4000, 500  # characters
# C0 and C1 controls except line feed and tab, bidirectional controls, line and paragraph separators, lone surrogates
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_unsafe(text: str, longest: int | None = None) -> str:
    """``text`` with unsafe characters as escapes, cut to ``longest`` characters if given.

    >>> escape_unsafe("a\\x1b[2Jb\\u202ec")
    'a\\\\x1b[2Jb\\\\u202ec'
    >>> escape_unsafe("a" * 10, 4)
    'aaaa… (10 characters)'
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}… ({len(text)} characters)"
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape_and_shorten(text: object) -> str:
    """``text`` as one message: unsafe characters as escapes, and at most ``LONGEST_MESSAGE`` characters.

    It omits the middle, since a message begins with the argument and ends with the remedy.
    """
    shown = escape_unsafe(str(text))
    if len(shown) <= LONGEST_MESSAGE:
        return shown
    start, end = LONGEST_MESSAGE * 3 // 4, LONGEST_MESSAGE // 4 - 40
    return f"{shown[:start]}… ({len(shown)} characters) …{shown[-end:]}"


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a whole number of Python or NumPy, excluding True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number of Python or NumPy, including NaN and infinity, excluding True and False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_whole(name: str, value: object, smallest: int, largest: int = 2**63 - 1) -> None:
    """Raise BadArgument unless ``value`` is a whole number of this range."""
    if not is_whole(value) or not smallest <= value <= largest:
        raise BadArgument(name, value, f"a whole number from {smallest:,} to {largest:,}", "pass an int")


def require_instance(name: str, value: object, kind: type | tuple[type, ...], remedy: str) -> None:
    """Raise BadArgument unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise BadArgument(name, value, f"an instance of {' or '.join(each.__name__ for each in kinds)}", remedy)


class EmadError(Exception):
    """Base of every error this package raises for its caller.

    Its message may quote files, decoders or paths, so its text has escaped control characters and a bounded length.
    """

    def __str__(self) -> str:
        return escape_and_shorten(super().__str__())


class BadArgument(EmadError, ValueError):
    """A value that cannot be accepted; the message reads ``name=value, but expected …; <remedy>``.

    Parameters
    ----------
    name : str
        The argument, option or key.
    value : object
        The given value; the message shows its ``repr``, cut to 500 characters.
    expected : str
        The accepted values.
    remedy : str
        The user's next step.
    """

    def __init__(self, name: str, value: object, expected: str, remedy: str = ""):
        self.name, self.value = name, value
        shown = escape_unsafe(_LINE_BREAK.sub(" ", repr(value)), LONGEST_VALUE)  # an array's repr has several lines
        super().__init__(f"{name}={shown}, but expected {expected}" + (f"; {remedy}" if remedy else ""))


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """A remedy, ``nearest: bfloat16, float16``: the likeliest of ``known``; "" if none is near."""
    close = nearest_names(word, known)
    return f"nearest: {', '.join(close)}" if close else ""


def nearest_names(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """At most ``most`` of ``known`` that ``word`` may mean, the likeliest first, ignoring case.

    A name is near if it is similar, or contains the word after removing punctuation. One that ends with the word is
    nearly equal: ``F1`` means ``EMAD-F1``. Among equally similar names, those with the word's beginning come first,
    then those first in ``known``.

    >>> nearest_names("EMAD-F9", ["EMAD-E9", "EMAD-F1", "EMAD-F2"])
    ['EMAD-F1', 'EMAD-F2', 'EMAD-E9']
    >>> nearest_names("E1", ["EE-1", "EE-10", "EE-11", "EMAD-E1"])
    ['EE-1', 'EMAD-E1', 'EE-10']
    """
    from difflib import SequenceMatcher  # only for messages

    sought = word.casefold()
    letters = _NOT_ALPHANUMERIC.sub("", sought)
    ranked = []
    for name in dict.fromkeys(known):
        folded = name.casefold()
        ratio = SequenceMatcher(None, folded, sought).ratio()
        others = _NOT_ALPHANUMERIC.sub("", folded)
        if len(letters) > 1 and others.endswith(letters):
            ratio = max(ratio, ENDS_ALIKE)
        if ratio >= NEAR or (len(letters) > 1 and letters in others):
            ranked.append((-ratio, -_common_start(folded, sought), name))
    ranked.sort(key=lambda each: each[:2])  # stable: keeps the order of ``known``
    return [name for *_, name in ranked[:most]]


def _common_start(one: str, other: str) -> int:
    """Length of the common start of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@contextmanager
def convert_errors_to_bad_argument(name: str, value: object, expected: str, remedy: str) -> Iterator[None]:
    """Turn every error of a library that reads user input inside the block into BadArgument with ``expected``.

    Raises:
        BadArgument: for any error of the library, with its text; an ``EmadError`` passes. A panic of a library in Rust
            is no ``Exception``, but counts as one.
    """
    try:
        yield
    except EmadError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise BadArgument(name, value, expected, f"{said}; {remedy}") from error


class MissingExtra(EmadError):
    """A package of an extra is not installed; the message has the command that installs it."""


EXTRA_OF_PACKAGE = {
    "accelerate": "gguf",
    "datasets": "tasks",
    "distributed": "cluster",
    "faiss": "faiss",
    "filelock": "gguf",
    "gguf": "gguf",
    "jinja2": "report",
    "lm_eval": "tasks",
    "matplotlib": "report",
    "pandas": "report",
    "rouge_score": "tasks",
    "zstandard": "inspect",
}


def require_extra(purpose: str, *packages: str, alternative: str = "") -> None:
    """Require packages of one extra, by the names that Python imports.

    Parameters
    ----------
    purpose : str
        What needs them: an option with its value, or a file.
    alternative : str
        What works without them.

    Raises
    ------
    MissingExtra
        One is not installed.
    """
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        remedy = f"pip install 'pytest-emad[{EXTRA_OF_PACKAGE[missing[0]]}]'" + (
            f", or {alternative}" if alternative else ""
        )
        raise MissingExtra(f"{purpose} needs {' and '.join(missing)}, not installed here; {remedy}")


def _is_installed(package: str) -> bool:
    return sys.modules[package] is not None if package in sys.modules else find_spec(package) is not None


def call_all(checks: Iterable[Callable[[], T]]) -> list[T]:
    """Results of all ``checks``, none of which needs another.

    Raises:
        EmadError: one failed; if several did, one error with all their messages, a line each.
    """
    results, errors = [], []
    for check in checks:
        try:
            results.append(check())
        except EmadError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise EmadError("\n".join(map(str, errors)))
    return results


class RunStopped(EmadError):
    """Raised if a whole run is impossible, so that it ends once instead of failing claim by claim."""


@contextmanager
def stop_run_on_error() -> Iterator[None]:
    """Turn an ``EmadError`` inside the block into the end of the run, not only of one claim.

    Raises:
        RunStopped: with the message of the inner error.
    """
    try:
        yield
    except EmadError as error:
        raise RunStopped(str(error)) from error
