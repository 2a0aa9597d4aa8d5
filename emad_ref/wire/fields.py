"""One JSON value as a field wants it: each reader takes (name, value) and raises ``BadArgument`` that names it.

JSON's true and false are no numbers, though Python counts them among its integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from emad_ref.errors import BadArgument

T = TypeVar("T")


def field(header: Mapping[str, Any], name: str, read: Callable[[str, Any], T]) -> T:
    """``name`` of ``header`` as ``read`` gives it; one that is not there is None."""
    return read(name, header.get(name))


def absent_or(read: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    return lambda name, value: None if value is None else read(name, value)


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(name: str, value: Any) -> int:
    if not is_whole(value):
        raise BadArgument(name, value, "a whole number")
    return value


def count(name: str, value: Any, least: int = 0) -> int:
    if not is_whole(value) or value < least:
        raise BadArgument(name, value, f"a whole number ≥ {least}")
    return value


def positive(name: str, value: Any) -> int:
    return count(name, value, 1)


def amount(name: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise BadArgument(name, value, "a finite number ≥ 0")
    return float(value)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadArgument(name, value, "a text")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadArgument(name, value, "true or false")
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadArgument(name, value, "an object")
    return value


def items(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BadArgument(name, value, "a list")
    return value
