"""Exceptions, and what they are raised for: text that is not printable, values that are no numbers.

Each message names the argument, its value, what was expected and what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from numbers import Integral, Real
from typing import TypeGuard

ENDS_ALIKE = 0.8  # ratio of a name that ends with the word
NEAR = 0.6  # ratio of difflib from which two names count as alike, its own default
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_LINE_BREAK = re.compile(r"\s*\n\s*")
LONGEST_MESSAGE, LONGEST_VALUE = 4000, 500  # characters
# C0 and C1 controls but line feed and tab, bidirectional controls, line and paragraph separators, lone surrogates
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_unsafe(text: str, longest: int | None = None) -> str:
    """``text`` with unsafe characters as escapes, cut to ``longest`` characters where that is given.

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

    The middle is left out: a message begins with the argument and ends with the remedy.
    """
    shown = escape_unsafe(str(text))
    if len(shown) <= LONGEST_MESSAGE:
        return shown
    start, end = LONGEST_MESSAGE * 3 // 4, LONGEST_MESSAGE // 4 - 40
    return f"{shown[:start]}… ({len(shown)} characters) …{shown[-end:]}"


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a whole number, of Python or NumPy. True and False are none, though Python counts them."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number, of Python or NumPy; NaN and infinity are, True and False are none."""
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

    Its message may quote files, decoders or paths: as text it has control characters escaped and a bounded length.
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
        What was given; its ``repr`` is shown, cut to 500 characters.
    expected : str
        What is accepted.
    remedy : str
        What to do about it.
    """

    def __init__(self, name: str, value: object, expected: str, remedy: str = ""):
        self.name, self.value = name, value
        shown = escape_unsafe(_LINE_BREAK.sub(" ", repr(value)), LONGEST_VALUE)  # an array's has several lines
        super().__init__(f"{name}={shown}, but expected {expected}" + (f"; {remedy}" if remedy else ""))


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """A remedy, ``nearest: bfloat16, float16``: the likeliest of ``known``; "" if none is near."""
    close = nearest_names(word, known)
    return f"nearest: {', '.join(close)}" if close else ""


def nearest_names(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """At most ``most`` of ``known`` that ``word`` may mean, the likeliest first, whatever their case.

    A name is near if it is alike, or if it contains the word once punctuation is dropped. One that ends with the word
    is nearly the same: ``F1`` means ``EMAD-F1``.
    Of names that are equally alike, those that begin as the word does come first, then those that ``known`` has first.

    >>> nearest_names("EMAD-F9", ["EMAD-E9", "EMAD-F1", "EMAD-F2"])
    ['EMAD-F1', 'EMAD-F2', 'EMAD-E9']
    >>> nearest_names("E1", ["EE-1", "EE-10", "EE-11", "EMAD-E1"])
    ['EE-1', 'EMAD-E1', 'EE-10']
    """
    from difflib import SequenceMatcher  # for a message alone

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
    """Number of characters with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@contextmanager
def convert_errors_to_bad_argument(name: str, value: object, expected: str, remedy: str) -> Iterator[None]:
    """Inside the block a library reads what a user gave, which may be damaged in any way: every error is ``expected``.

    Raises:
        BadArgument: whatever the library raised, with its text; errors of ours pass. A panic of a library in Rust is
            no ``Exception``, but counts as one.
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


class RunStopped(EmadError):
    """What was asked of a whole run is impossible: it ends once, instead of failing question by question."""


@contextmanager
def stop_run_on_error() -> Iterator[None]:
    """Inside the block, an error of ours is the end of the run and not of one question.

    Raises:
        RunStopped: with the message of the error that was raised inside.
    """
    try:
        yield
    except EmadError as error:
        raise RunStopped(str(error)) from error
