"""Exceptions. Each message names the argument, its value, what was expected and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class EmadError(Exception):
    """Base of every error this package raises for its caller."""


class BadArgument(EmadError, ValueError):
    """A value that cannot be accepted: ``name=value, but <expected>; <remedy>``."""

    def __init__(self, name: str, value: object, expected: str, remedy: str = ""):
        self.name, self.value = name, value
        super().__init__(f"{name}={value!r}, but expected {expected}" + (f"; {remedy}" if remedy else ""))


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy, ``nearest: bfloat16, float16``: the likeliest of ``known``, whatever their case; "" if none is near."""
    from difflib import get_close_matches  # for a message alone

    spelt = {name.casefold(): name for name in known}
    close = get_close_matches(word.casefold(), spelt, n=3)
    return f"nearest: {', '.join(spelt[name] for name in close)}" if close else ""


class RunStopped(EmadError):
    """What was asked of a whole run is impossible: it ends once, instead of failing question by question."""


@contextmanager
def ends_the_run() -> Iterator[None]:
    """Inside the block, an error of ours is the end of the run and not of one question.

    Raises:
        RunStopped: with the message of the error that was raised inside.
    """
    try:
        yield
    except EmadError as error:
        raise RunStopped(str(error)) from error
