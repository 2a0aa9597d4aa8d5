"""Operating points as the wire carries them: ``OperatingPoint.to_json`` without infinities, and the way back.

JSON has no infinite numbers: they travel as the texts ``inf`` and ``-inf``. What comes from another process is read by
the type of each field; what the fields mean, and what is refused, ``emad_ref.point`` decides as for any other point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.point import BinSpec, Confidence, Estimator, OperatingPoint
from emad_ref.wire.fields import absent_or, flag, is_number, text, whole

T = TypeVar("T")
_WORDS = {"inf": math.inf, "-inf": -math.inf}


def to_json(point: OperatingPoint) -> dict[str, Any]:
    """``point.to_json()``, every infinity as its text. Raises BadArgument for a NaN, which no text stands for."""
    plain: dict[str, Any] = _worded(point.to_json())
    return plain


def from_json(plain: Any) -> OperatingPoint:
    """The inverse of ``to_json`` and of ``OperatingPoint.to_json``.

    Keys that are not known are ignored; absent ones take their default.

    Raises:
        BadArgument: a value of another type, by its name; a required field that is not there; or a point that is none.
    """
    return _read("point", OperatingPoint, plain)


def _worded(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _worded(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_worded(value) for value in plain]
    if isinstance(plain, np.generic):  # a point made from an array's values
        plain = plain.item()
    if isinstance(plain, float) and math.isnan(plain):
        raise BadArgument("point", plain, "numbers, not NaN")
    return {math.inf: "inf", -math.inf: "-inf"}.get(plain, plain) if isinstance(plain, float) else plain


def _read(name: str, kind: type[T], plain: Any) -> T:
    """An instance of one of point's classes, each field read by its row in ``_FIELDS``."""
    if not isinstance(plain, Mapping):
        raise BadArgument(name, plain, "an object with the fields of a point")
    readers = _FIELDS[kind.__name__]
    given = {key: read(f"{name}.{key}", plain[key]) for key, read in readers.items() if key in plain}
    for field in fields(kind):  # type: ignore[arg-type]  # T is always one of ours
        if field.default is MISSING and field.name not in given:
            raise BadArgument(f"{name}.{field.name}", None, "a value", "this field has no default")
    return kind(**given)


def _number(name: str, value: Any) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if not is_number(value):
        raise BadArgument(name, value, "a number, 'inf' or '-inf'")
    try:
        return float(value)
    except OverflowError:
        raise BadArgument(name, "an integer of many digits", "a number that a double holds") from None


def _bytes(name: str, value: Any) -> bytes:
    try:
        return bytes.fromhex(text(name, value))
    except ValueError:
        raise BadArgument(name, value, "hexadecimal digits, two per token id") from None


def _many(name: str, value: Any, read: Callable[[str, Any], T]) -> tuple[T, ...]:
    if not isinstance(value, list | tuple):
        raise BadArgument(name, value, "a list")
    return tuple(read(f"{name}[{i}]", one) for i, one in enumerate(value))


def _rate_and_longest(name: str, value: Any) -> tuple[float, float]:
    numbers = _many(name, value, _number)
    if len(numbers) != 2:
        raise BadArgument(name, value, "two numbers")
    return numbers[0], numbers[1]


def _each(read: Callable[[str, Any], T]) -> Callable[[str, Any], tuple[T, ...]]:
    return partial(_many, read=read)


_FIELDS: dict[str, dict[str, Callable[[str, Any], Any]]] = {
    "Estimator": {
        "kind": text,
        "k": whole,
        "rank": whole,
        "search": text,
        "correction": _each(_rate_and_longest),
        "weights": _each(_each(_number)),
    },
    "Confidence": {
        "minimum": whole,
        "alpha": _number,
        "alpha_decay": absent_or(_number),
        "emit": text,
        "rescale": flag,
        "kept": _each(whole),
        "shrink": absent_or(_number),
    },
    "BinSpec": {
        "features": _each(text),
        "position_edges": _each(whole),
        "confidence_edges": _each(_number),
        "frequency": _bytes,
    },
    "OperatingPoint": {
        "name": text,
        "family": text,
        "layers": whole,
        "ceiling": whole,
        "probes": _each(whole),
        "thresholds": _each(_each(_number)),
        "schedule": text,
        "estimator": lambda name, value: _read(name, Estimator, value),
        "signal": text,
        "bins": lambda name, value: _read(name, BinSpec, value),
        "margin_nats": absent_or(_number),
        "period": absent_or(whole),
        "floor": absent_or(whole),
        "translators": absent_or(text),
        "interpolate": flag,
        "confidence": absent_or(lambda name, value: _read(name, Confidence, value)),
        "decay": absent_or(_rate_and_longest),
        "lens": absent_or(text),
    },
}
