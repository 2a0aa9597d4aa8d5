"""Does a small generated function pass its asserts? Decided by a tree walk, never by running generated text.

Only what the world's ``code`` passage can hold is a program here: functions of one argument that return an
arithmetic expression, and asserts that compare a call with an integer. Anything else simply does not pass.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
LARGEST = 10**12  # generated text must not make us multiply without end


class _Outside(Exception):
    """The program uses something that is not part of the little language."""


def passes(program: str) -> bool:
    """Whether ``program`` is in the little language, holds at least one assert, and all its asserts are true."""
    try:
        statements = ast.parse(program).body
        functions = {s.name: s for s in statements if isinstance(s, ast.FunctionDef)}
        asserts = [s for s in statements if isinstance(s, ast.Assert)]
        if len(functions) + len(asserts) != len(statements) or not asserts:
            return False
        return all(_holds(statement.test, functions) for statement in asserts)
    except (_Outside, SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # not a program of the language: by definition it does not pass


def _holds(test: ast.expr, functions: dict[str, ast.FunctionDef]) -> bool:
    match test:
        case ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[expected]):
            return _value(call, {}, functions) == _value(expected, {}, {})
    raise _Outside


def _value(node: ast.expr, names: dict[str, int], functions: dict[str, ast.FunctionDef]) -> int:
    match node:
        case ast.Constant(value=bool()):
            raise _Outside
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left, names, functions), _value(right, names, functions))
            if abs(value) > LARGEST:
                raise _Outside
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names, functions)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in functions and not names:
            return _call(functions[name], _value(argument, names, functions), functions)
    raise _Outside


def _call(function: ast.FunctionDef, argument: int, functions: dict[str, ast.FunctionDef]) -> int:
    match function:
        case ast.FunctionDef(
            args=ast.arguments(
                posonlyargs=[], args=[ast.arg(arg=name)], vararg=None, kwonlyargs=[], kwarg=None, defaults=[]
            ),
            body=[ast.Return(value=ast.expr() as result)],
            decorator_list=[],
        ):
            return _value(result, {name: argument}, functions)
    raise _Outside
