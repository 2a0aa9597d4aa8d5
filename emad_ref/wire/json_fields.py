"""JSON values read as typed fields, and operating points as JSON.

Each reader takes (name, value) and raises ``BadArgument`` that names it. JSON's true and false are no numbers, though
Python counts them among its integers. JSON has no infinite numbers: they travel as the texts ``inf`` and ``-inf``.
What
the fields of a point mean, and what is refused, ``emad_ref.point`` decides as for any other point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, TypeGuard, TypeVar

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.point import BinSpec, Confidence, Estimator, OperatingPoint

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


Part = TypeVar("Part")
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}


def point_to_json(point: OperatingPoint) -> dict[str, Any]:
    """``point.to_json()``, every infinity as its text. Raises BadArgument for a NaN, which no text stands for."""
    plain: dict[str, Any] = _without_infinities(point.to_json())
    return plain


def point_from_json(plain: Any) -> OperatingPoint:
    """The inverse of ``to_json`` and of ``OperatingPoint.to_json``.

    Keys that are not known are ignored; absent ones take their default.

    Raises:
        BadArgument: a value of another type, by its name; a required field that is not there; or a point that is none.
    """
    return _read_part("point", OperatingPoint, plain)


def _without_infinities(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _without_infinities(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_without_infinities(value) for value in plain]
    if isinstance(plain, np.generic):  # a point made from an array's values
        plain = plain.item()
    if isinstance(plain, float) and math.isnan(plain):
        raise BadArgument("point", plain, "numbers, not NaN")
    return {math.inf: "inf", -math.inf: "-inf"}.get(plain, plain) if isinstance(plain, float) else plain


def _read_part(name: str, kind: type[Part], plain: Any) -> Part:
    """An instance of one of point's classes, each field read by its row in ``_FIELDS``."""
    if not isinstance(plain, Mapping):
        raise BadArgument(name, plain, "an object with the fields of a point")
    readers = _POINT_READERS[kind.__name__]
    given = {key: read(f"{name}.{key}", plain[key]) for key, read in readers.items() if key in plain}
    for field in fields(kind):  # type: ignore[arg-type]  # T is always one of ours
        if field.default is MISSING and field.name not in given:
            raise BadArgument(f"{name}.{field.name}", None, "a value", "this field has no default")
    return kind(**given)


def _read_number(name: str, value: Any) -> float:
    if isinstance(value, str) and value in _INFINITIES:
        return _INFINITIES[value]
    if not is_number(value):
        raise BadArgument(name, value, "a number, 'inf' or '-inf'")
    try:
        return float(value)
    except OverflowError:
        raise BadArgument(name, "an integer of many digits", "a number that a double holds") from None


def _read_bytes(name: str, value: Any) -> bytes:
    try:
        return bytes.fromhex(text(name, value))
    except ValueError:
        raise BadArgument(name, value, "hexadecimal digits, two per token id") from None


def _read_many(name: str, value: Any, read: Callable[[str, Any], Part]) -> tuple[Part, ...]:
    if not isinstance(value, list | tuple):
        raise BadArgument(name, value, "a list")
    return tuple(read(f"{name}[{i}]", one) for i, one in enumerate(value))


def _read_number_pair(name: str, value: Any) -> tuple[float, float]:
    numbers = _read_many(name, value, _read_number)
    if len(numbers) != 2:
        raise BadArgument(name, value, "two numbers")
    return numbers[0], numbers[1]


def _list_of(read: Callable[[str, Any], Part]) -> Callable[[str, Any], tuple[Part, ...]]:
    return partial(_read_many, read=read)


_POINT_READERS: dict[str, dict[str, Callable[[str, Any], Any]]] = {
    "Estimator": {
        "kind": text,
        "k": whole,
        "rank": whole,
        "search": text,
        "correction": _list_of(_read_number_pair),
        "weights": _list_of(_list_of(_read_number)),
    },
    "Confidence": {
        "minimum": whole,
        "alpha": _read_number,
        "alpha_decay": absent_or(_read_number),
        "emit": text,
        "rescale": flag,
        "kept": _list_of(whole),
        "shrink": absent_or(_read_number),
    },
    "BinSpec": {
        "features": _list_of(text),
        "position_edges": _list_of(whole),
        "confidence_edges": _list_of(_read_number),
        "frequency": _read_bytes,
    },
    "OperatingPoint": {
        "name": text,
        "family": text,
        "layers": whole,
        "ceiling": whole,
        "probes": _list_of(whole),
        "thresholds": _list_of(_list_of(_read_number)),
        "schedule": text,
        "estimator": lambda name, value: _read_part(name, Estimator, value),
        "signal": text,
        "bins": lambda name, value: _read_part(name, BinSpec, value),
        "margin_nats": absent_or(_read_number),
        "period": absent_or(whole),
        "floor": absent_or(whole),
        "translators": absent_or(text),
        "interpolate": flag,
        "confidence": absent_or(lambda name, value: _read_part(name, Confidence, value)),
        "decay": absent_or(_read_number_pair),
        "lens": absent_or(text),
    },
}
