"""Plain values pass between a program and its check with their type; all others are refused."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from fractions import Fraction

import pytest

from pytest_emad.tasks.sandbox_protocol import OpaqueValue, decode_value, encode_value


def crossed(value):
    return decode_value(json.loads(json.dumps(encode_value(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        2**53 - 1,
        2**53,
        -(2**64),
        1 << 20_000,
        0.0,
        0.1,
        1e300,
        5e-324,
        math.inf,
        -math.inf,
        2.0,
        1j,
        complex(math.inf, -1),
        "",
        "é\u2028\0",
        "\ud800",
        "\ud83d\ude00",
        "\N{GRINNING FACE}",
        b"",
        b"\x00\xff",
        bytearray(b"ab"),
        [],
        (),
        {},
        set(),
        frozenset(),
        [1, (2, [3.0, {4}]), {"a": {(1, 2): None}}],
        {1: "a", "1": "b", None: True, (True, b"x"): frozenset({1})},
        range(3, 10, -2),
        range(10**30),
        Fraction(1, 3),
        Decimal("0.10"),
        {"foreign": [1, 2, 3]},
        ["foreign", "x", True, None],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_plain_value_crosses_with_its_type(value):
    found = crossed(value)
    assert (type(found), found) == (type(value), value)
    if type(value) is not int:  # its repr has a limit
        assert repr(found) == repr(value)


def test_signs_of_zero_and_not_a_number_cross():
    assert math.copysign(1, crossed(-0.0)) == -1
    assert math.isnan(crossed(math.nan))
    assert math.isnan(crossed([math.nan])[0])


class Always(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


Pair = namedtuple("Pair", "a b")
Colour = enum.IntEnum("Colour", "RED")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Always(3), 3),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Pair(1, 2), (1, 2)),
        (Colour.RED, 1),
    ],
)
def test_a_value_of_a_subclass_crosses_as_one_of_the_class(value, plain):
    found = crossed(value)
    assert type(found) is type(plain)
    assert repr(found) == repr(plain)


def test_an_object_crosses_as_a_stand_in_that_equals_nothing():
    found = crossed(crossed)
    assert isinstance(found, OpaqueValue)
    assert found != crossed(crossed)
    assert not found == 1  # noqa: SIM201
    with pytest.raises(TypeError, match="'function' object is not iterable"):
        iter(found)
    with pytest.raises(TypeError):
        found()


def test_what_can_be_iterated_over_gives_its_items_once():
    found = crossed(n * n for n in range(3))
    assert list(found) == [0, 1, 4]
    assert list(found) == []
    assert sorted(crossed({"b": 1, "a": 2}.keys())) == ["a", "b"]


@pytest.mark.parametrize(
    "plain",
    [
        [],
        {},
        {"list": 3},
        {"list": [[]]},
        {"code": "x"},
        {"dict": [[{"list": []}, 1]]},
        {"int": "x"},
        {"set": [{"set": []}]},
        {"bytes": "0"},
        {"int": "1", "str": ""},
        {"foreign": []},
        {"range": [1.5, 2, 3]},
    ],
)
def test_anything_else_is_no_value(plain):
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError, IndexError)):
        decode_value(plain)


def test_what_contains_itself_does_not_cross():
    endless = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        encode_value(endless)
