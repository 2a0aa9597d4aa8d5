"""A generated function is judged by a tree walk that agrees with Python and runs nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.tasks.scoring import LARGEST_VALUE, program_passes

DOUBLE = "def double(x):\n    return x * 2\n"


def expressions():
    leaves = st.one_of(st.just("x"), st.integers(-20, 20).map(lambda n: f"({n})"))
    return st.recursive(leaves, lambda e: st.builds("({} {} {})".format, e, st.sampled_from("+-*"), e), max_leaves=6)


@given(expressions(), st.integers(-9, 9))
def test_a_program_passes_exactly_when_python_says_so(body, argument):
    program = f"def f(x):\n    return {body}\n"
    value = eval(body, {"x": argument})
    assert program_passes(f"{program}assert f({argument}) == {value}\n")
    assert not program_passes(f"{program}assert f({argument}) == {value + 1}\n")


@pytest.mark.parametrize(
    "program",
    [
        DOUBLE + "assert double(3) == 6",
        DOUBLE + "assert double(-3) == -6",
        DOUBLE + "assert double(double(3)) == 12",
        DOUBLE + "assert double(3) == 6\nassert double(0) == 0",
    ],
)
def test_true_asserts_pass(program):
    assert program_passes(program)


@pytest.mark.parametrize(
    "program",
    [
        "",
        DOUBLE,
        "def double(x):\n    return x *\nassert double(3) == 6",
        "\0",
        "assert 1",
        "assert 2 == 2",
        DOUBLE + "assert double(3)",
        DOUBLE + "assert double(3) == double(3)",
        DOUBLE + "assert double(3) == 6 == 6",
        DOUBLE + "assert double(3) == 6.0",
        DOUBLE + "assert double(3) != 7",
        DOUBLE + "assert double(True) == 2",
        DOUBLE + "assert double(3, 4) == 6",
        DOUBLE + "assert double(x=3) == 6",
        DOUBLE + "assert triple(3) == 6",
        DOUBLE + "assert double(3) == 6\nassert double(3) == 7",
        DOUBLE + "double(3)\nassert double(3) == 6",
        DOUBLE + DOUBLE + "assert double(3) == 6",
        DOUBLE + "import os\nassert double(3) == 6",
        "@double\n" + DOUBLE + "assert double(3) == 6",
        "def double(x, y):\n    return x * 2\nassert double(3) == 6",
        "def double(y, /, x):\n    return x * 2\nassert double(3) == 6",
        "def double(x=1):\n    return x * 2\nassert double(3) == 6",
        "def double(*x):\n    return 6\nassert double(3) == 6",
        "def double(x):\n    return y * 2\nassert double(3) == 6",
        "def double(x):\n    return\nassert double(3) == 6",
        "def double(x):\n    x = 3\n    return x * 2\nassert double(3) == 6",
        "def double(x):\n    return double(x)\nassert double(3) == 6",
        "def double(x):\n    return x ** 2\nassert double(3) == 9",
        "def double(x):\n    return x / 1\nassert double(3) == 3",
        "def double(x):\n    return print(x)\nassert double(3) == 3",
        "def double(x):\n    return 6 if x else 0\nassert double(3) == 6",
    ],
)
def test_anything_else_does_not_pass(program):
    assert not program_passes(program)


def test_numbers_without_end_are_not_computed():
    assert program_passes(f"def f(x):\n    return x * {LARGEST_VALUE}\nassert f(1) == {LARGEST_VALUE}")
    assert not program_passes(f"def f(x):\n    return x * {LARGEST_VALUE}\nassert f(2) == {2 * LARGEST_VALUE}")


@pytest.mark.parametrize("opener", ["(", "-", "x * ("])
def test_nesting_without_end_is_a_failure_and_not_a_crash(opener):
    assert not program_passes(f"def f(x):\n    return {opener * 5000}x\nassert f(1) == 1")
