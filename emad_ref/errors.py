"""Exceptions. Each message names the argument, its value, what was expected and what to do about it."""

from __future__ import annotations


class EmadError(Exception):
    """Base of every error this package raises for its caller."""


class BadArgument(EmadError, ValueError):
    """A value that cannot be accepted: ``name=value, but <expected>; <remedy>``."""

    def __init__(self, name: str, value: object, expected: str, remedy: str = ""):
        self.name, self.value = name, value
        super().__init__(f"{name}={value!r}, but expected {expected}" + (f"; {remedy}" if remedy else ""))
