"""Exceptions. Each message names the argument, its value, what was expected and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_MESSAGE, LONGEST_VALUE = 4000, 500  # characters
# C0 and C1 controls but line feed and tab, bidirectional controls, line and paragraph separators, lone surrogates
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, longest: int | None = None) -> str:
    """``text`` with unsafe characters as escapes, cut to ``longest`` characters where that is given.

    >>> printable("a\\x1b[2Jb\\u202ec")
    'a\\\\x1b[2Jb\\\\u202ec'
    >>> printable("a" * 10, 4)
    'aaaa… (10 characters)'
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}… ({len(text)} characters)"
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class EmadError(Exception):
    """Base of every error this package raises for its caller.

    Its message may quote files, decoders or paths: as text it has control characters escaped and a bounded length.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), LONGEST_MESSAGE)


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
        shown = printable(repr(value), LONGEST_VALUE)
        super().__init__(f"{name}={shown}, but expected {expected}" + (f"; {remedy}" if remedy else ""))


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """A remedy, ``nearest: bfloat16, float16``: the likeliest of ``known``, whatever their case; "" if none is near."""
    from difflib import get_close_matches  # for a message alone

    spelt = {name.casefold(): name for name in known}
    close = get_close_matches(word.casefold(), spelt, n=3)
    return f"nearest: {', '.join(spelt[name] for name in close)}" if close else ""


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
