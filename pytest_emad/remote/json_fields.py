"""JSON values read as typed fields, and operating points as JSON.

Each reader takes (name, value) and raises ``BadArgument`` that names it. JSON's true and false do not count as numbers.
JSON lacks infinite numbers, so they are sent as the texts ``inf`` and ``-inf``. ``emad_ref.point`` checks the fields of
a point, as for any other point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from emad_ref.errors import BadArgument, is_number, is_whole
from emad_ref.point import OperatingPoint

T = TypeVar("T")


def read_field(header: Mapping[str, Any], name: str, read: Callable[[str, Any], T]) -> T:
    """Field ``name`` of ``header``, read by ``read``; a missing one is None."""
    return read(name, header.get(name))


def parse_optional(read: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    return lambda name, value: None if value is None else read(name, value)


def parse_integer(name: str, value: Any) -> int:
    if not is_whole(value):
        raise BadArgument(name, value, "a whole number")
    return value


def parse_count(name: str, value: Any, least: int = 0) -> int:
    if not is_whole(value) or value < least:
        raise BadArgument(name, value, f"a whole number ≥ {least}")
    return value


def parse_positive_integer(name: str, value: Any) -> int:
    return parse_count(name, value, 1)


def parse_nonnegative_number(name: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise BadArgument(name, value, "a finite number ≥ 0")
    return float(value)


def parse_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadArgument(name, value, "a text")
    return value


def parse_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadArgument(name, value, "true or false")
    return value


def parse_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadArgument(name, value, "an object")
    return value


def parse_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BadArgument(name, value, "a list")
    return value


# ---------------------------------------------------------------- operating points


def point_to_json(point: OperatingPoint) -> dict[str, Any]:
    """``point.to_json()`` with infinities as texts. Raises BadArgument for a NaN."""
    plain: dict[str, Any] = _without_infinities(point.to_json())
    return plain


def point_from_json(plain: Any) -> OperatingPoint:
    """The inverse of ``point_to_json`` and of ``OperatingPoint.to_json``.

    Unknown keys are ignored; absent ones take their default.

    Raises:
        BadArgument: a value of another type, by its name; a missing required field; or an invalid point.
    """
    point: OperatingPoint = _read("point", OperatingPoint, plain)
    return point


def _without_infinities(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _without_infinities(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_without_infinities(value) for value in plain]
    if isinstance(plain, np.generic):  # a point made from an array's values
        plain = plain.item()
    if isinstance(plain, float) and math.isnan(plain):
        raise BadArgument("point", plain, "numbers, not NaN")
    return str(plain) if isinstance(plain, float) and math.isinf(plain) else plain


def _read(name: str, kind: Any, value: Any) -> Any:
    """``value`` as ``kind``, the type that a class of ``emad_ref.point`` declares for the field."""
    arguments = get_args(kind)
    if type(None) in arguments:
        return None if value is None else _read(name, arguments[0], value)
    if is_dataclass(kind):
        return _read_object(name, kind, value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise BadArgument(name, value, "a list")
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise BadArgument(name, value, "two numbers")
        return tuple(_read(f"{name}[{i}]", arguments[0], one) for i, one in enumerate(value))
    return {int: parse_integer, bool: parse_bool, float: _number, bytes: _token_ids}.get(kind, parse_text)(name, value)


def _read_object(name: str, kind: Any, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise BadArgument(name, value, "an object with the fields of a point")
    hints = get_type_hints(kind)
    known_fields = {key: _read(f"{name}.{key}", hint, value[key]) for key, hint in hints.items() if key in value}
    for each in fields(kind):
        if each.default is MISSING and each.name not in known_fields:
            raise BadArgument(f"{name}.{each.name}", None, "a value", "this field has no default")
    return kind(**known_fields)


def _number(name: str, value: Any) -> float:
    if value not in ("inf", "-inf") and not is_number(value):
        raise BadArgument(name, value, "a number, 'inf' or '-inf'")
    try:
        return float(value)
    except OverflowError:
        raise BadArgument(name, "an integer of many digits", "a number that a double holds") from None


def _token_ids(name: str, value: Any) -> bytes:
    try:
        return bytes.fromhex(parse_text(name, value))
    except ValueError:
        raise BadArgument(name, value, "hexadecimal digits, two per token id") from None
