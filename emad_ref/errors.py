"""Exceptions. Each message names the argument, its value, what was expected and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EmadError(Exception):
    """Base of every error this package raises for its caller."""


class BadArgument(EmadError, ValueError):
    """A value that cannot be accepted: ``name=value, but <expected>; <remedy>``."""

    def __init__(self, name: str, value: object, expected: str, remedy: str = ""):
        self.name, self.value = name, value
        super().__init__(f"{name}={value!r}, but expected {expected}" + (f"; {remedy}" if remedy else ""))


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
