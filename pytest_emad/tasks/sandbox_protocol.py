"""Protocol of the sandbox: one interpreter runs the program, another its check, and plain values cross between them.

Neither interpreter sees an installed package, so each runs this file, which imports the standard library only, as a
script. The program can change everything in its own process. From any bytes that it sends, the check's end reads a
plain value or an exception, or exits with code ``GONE``.

    check → program    [arguments, keyword arguments]       one line of JSON each, values by ``encode_value``
    program → check    ["value", value] or ["raised", name of a built-in exception, its arguments]; the first line, sent
                       before the program runs, is "started"
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

# exit codes: GONE is a check without an answer, UNFIT one whose calls cannot be sent, NOT_STARTED one whose program's
# process never came to run the program
PASSED, REFUTED, OUT_OF_MEMORY, GONE, UNFIT, NOT_STARTED = range(93, 99)
STARTED = "started"
LINE_BYTES = 16 << 20  # most bytes of one call or answer
ITEMS = 1 << 20  # most items of an iterator
EXACT = 2**53  # longer whole numbers are sent in hexadecimal: Python limits the length of decimal ones


class OpaqueValue:
    """Represents a program's object that is no plain value: equal only to itself, with that object's truth value.

    ``items``: the items of an iterable object, sent once; None for other objects.
    """

    def __init__(self, name: str, truth: bool, items: list[Any] | None):
        self.name, self.truth = name, truth
        self._items = None if items is None else iter(items)

    def __bool__(self) -> bool:
        return self.truth

    def __iter__(self) -> Iterator[Any]:
        if self._items is None:
            raise TypeError(f"{self.name!r} object is not iterable")
        return self._items


# ---------------------------------------------------------------- values


def encode_value(value: Any) -> Any:
    """``value`` as JSON; ``decode_value`` gives an equal value of the same type.

    A value of a subclass becomes one of its class in ``KINDS``; any other object becomes an ``OpaqueValue``. An
    ``OpaqueValue`` cannot be sent back to the program: its JSON cannot be decoded.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, OpaqueValue):
        return {"returned": value.name}
    for kind, to_json, _ in KINDS:
        if isinstance(value, kind):
            return to_json(value)
    for name, module in NUMBERS.items():
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
            return {name: str(value)}
    items = [encode_value(item) for item, _ in zip(value, range(ITEMS))] if hasattr(type(value), "__iter__") else None  # noqa: B905
    return {"foreign": [type(value).__name__, bool(value), items]}


def decode_value(plain: Any) -> Any:
    """The value that ``encode_value`` wrote; raises any exception for anything else."""
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    ((name, content),) = plain.items()
    return READERS[name](content)


def _number(name: str) -> Callable[[str], Any]:
    return lambda text: getattr(__import__(NUMBERS[name]), name)(text)


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON would make one character of two surrogates
        return {"str": value.encode("utf-32", "surrogatepass").hex()}
    return str(value)


def _many(name: str, make: Callable[[list[Any]], Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return lambda value: {name: [*map(encode_value, value)]}, lambda items: make([*map(decode_value, items)])


KINDS: list[tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (str, _text, lambda digits: bytes.fromhex(digits).decode("utf-32", "surrogatepass")),
    (int, lambda value: int(value) if abs(value) < EXACT else {"int": hex(value)}, lambda digits: int(digits, 16)),
    (float, float, float),
    (complex, lambda value: {"complex": [value.real, value.imag]}, lambda parts: complex(*parts)),
    (bytes, lambda value: {"bytes": value.hex()}, bytes.fromhex),
    (bytearray, lambda value: {"bytearray": value.hex()}, bytearray.fromhex),
    (list, *_many("list", list)),
    (tuple, *_many("tuple", tuple)),
    (set, *_many("set", set)),
    (frozenset, *_many("frozenset", frozenset)),
    (
        dict,
        lambda value: {"dict": [[encode_value(key), encode_value(item)] for key, item in value.items()]},
        lambda pairs: {decode_value(key): decode_value(item) for key, item in pairs},
    ),
    (range, lambda value: {"range": [value.start, value.stop, value.step]}, lambda parts: range(*parts)),
]
NUMBERS = {"Fraction": "fractions", "Decimal": "decimal"}  # imported on first use
READERS: dict[str, Callable[[Any], Any]] = {kind.__name__: reader for kind, _, reader in KINDS}
READERS |= {name: _number(name) for name in NUMBERS}
READERS["foreign"] = lambda parts: OpaqueValue(
    str(parts[0]), bool(parts[1]), None if parts[2] is None else [*map(decode_value, parts[2])]
)


# ---------------------------------------------------------------- in the two interpreters


def main(role: str, name: str, settings: str, calls: str, answers: str) -> None:
    """Limit this process, then act as ``role``, one of ``ROLES``.

    Parameters
    ----------
    role, name : str
        The role, and the program's function that the check calls.
    settings : str
        JSON: ``limits`` of setrlimit by name, and ``user``: whom root becomes, null to stay.
    calls, answers : str
        Descriptors of this process's ends of the pipes.
    """
    import resource  # absent on Windows, where this module can still be imported

    limits, user = map(json.loads(settings).get, ("limits", "user"))
    for limit, value in limits.items():
        kind, over = getattr(resource, limit), 0
        if limit == "RLIMIT_CPU":
            signal.alarm(value)
            over = 1  # SIGXCPU at the soft limit names the reason, SIGKILL at the hard one
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY and hard < value + over:
            sys.exit(f"{limit} of this process is {hard}, but the sandbox needs {value + over}; raise it")
        resource.setrlimit(kind, (value, value + over))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # drops all privileges
    ROLES[role](name, int(calls), int(answers))


def _answer(name: str, calls: int, answers: int) -> None:
    """Run the program on standard input, then call its function ``name`` for each call of the check."""
    sys.excepthook = _handle_uncaught
    names = _new_main_module()
    with os.fdopen(calls, "rb") as call_stream, os.fdopen(answers, "wb") as answered:
        _send(answered, STARTED)
        _execute(sys.stdin.buffer.read(), "<program>", names)
        if name not in names:
            _exit(1, f"the program defines no {name}")
        _send(answered, ["value", None])  # it exists
        for line in call_stream:
            positional, named = (decode_value(plain) for plain in json.loads(line))
            try:
                reply = ["value", encode_value(names[name](*positional, **named))]
            except Exception as error:
                kinds = (kind.__name__ for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind)
                reply = ["raised", next(kinds), encode_value([*error.args])]
            _send(answered, reply)


def _handle_uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    if issubclass(kind, MemoryError):
        os._exit(OUT_OF_MEMORY)
    sys.__excepthook__(kind, error, trace)


def _check(name: str, calls: int, answers: int) -> NoReturn:
    """Run the check on standard input, where ``name`` calls the program; exit with ``PASSED`` after its last line.

    The input is JSON, [definitions, check]; a definition of ``name`` is replaced.
    """
    definitions, check = json.load(sys.stdin)
    names = _new_main_module()
    with os.fdopen(calls, "wb") as call_stream, os.fdopen(answers, "rb") as answered:
        if answered.readline(LINE_BYTES) != json.dumps(STARTED).encode() + b"\n":
            os._exit(NOT_STARTED)
        try:
            _execute(definitions, "<definitions>", names)
            _receive(answered)
            names[name] = _remote_function(name, call_stream, answered)
            _execute(check, "<check>", names)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:  # also SystemExit: only the last line passes
            try:
                traceback.print_exc()
            finally:  # the traceback module may stumble over the arguments of the program's exception
                os._exit(REFUTED)
        os._exit(PASSED)


ROLES: dict[str, Callable[..., None]] = {"answers": _answer, "check": _check}


def _remote_function(name: str, call_stream: IO[bytes], answered: IO[bytes]) -> Callable[..., Any]:
    def candidate(*positional: Any, **named: Any) -> Any:
        call = [encode_value([*positional]), encode_value(named)]
        written = json.dumps(call)
        if '{"returned": ' in written:  # inside a text its quotes would be escaped
            _exit(REFUTED, f"{name} is called with an object that it returned before, which is no plain value")
        if '{"foreign": ' in written:
            _exit(UNFIT, f"{name} is called with something that is no plain value")
        try:
            _send(call_stream, call)
        except OSError as error:
            _exit(GONE, f"the program reads no calls: {error}")
        value, raised = _receive(answered)
        if isinstance(raised, StopIteration):  # `all(map(f, inputs))` would take it for the end of the inputs
            raise RuntimeError(f"{name} raised StopIteration") from raised
        if raised is not None:
            raise raised
        return value

    candidate.__name__ = name
    return candidate


def _send(stream: IO[bytes], what: Any) -> None:
    stream.write(json.dumps(what).encode() + b"\n")
    stream.flush()


def _receive(answered: IO[bytes]) -> tuple[Any, Exception | None]:
    """(value that the program returns, exception that it raises).

    Without an answer the process exits, because a check that expects an exception must not get one.
    """
    line = answered.readline(LINE_BYTES)
    if not line:
        _exit(GONE, "the program has ended")
    try:
        kind, *content = json.loads(line)
        if kind == "value":
            return decode_value(*content), None
        family, arguments = vars(builtins)[content[0]], decode_value(content[1])
        if not issubclass(family, Exception):
            raise TypeError(content[0])
        return None, _make_exception(family, arguments)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        _exit(GONE, f"the program answers with no value ({type(error).__name__}: {error}): {line[:80]!r}")


def _make_exception(family: type[Exception], arguments: list[Any]) -> Exception:
    try:
        return family(*arguments)
    except TypeError:  # its class takes other arguments, as UnicodeError's kinds do
        return family.__new__(family, *arguments)


def _exit(code: int, reason: str) -> NoReturn:
    sys.stderr.write(f"{reason}\n")
    sys.stderr.flush()
    os._exit(code)


def _new_main_module() -> dict[str, Any]:
    """The names of a new main module."""
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    return vars(module)


def _execute(source: bytes | str, name: str, names: dict[str, Any]) -> None:
    exec(compile(source, name, "exec", dont_inherit=True), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
