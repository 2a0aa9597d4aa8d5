"""Which parts of the judge somebody replaced: a fixture of ours, a function, a class, a method, a constant.

A run whose audits were exchanged says nothing about a decoder, however green it is. So at the end of the body of each
shipped test, what our modules hold is compared with what their source defines: a definition must have been made in its
own module, and an imported name must be what the module that defines it holds. Only loaded modules are looked at, each
is parsed once. This check does not see a change inside a library, nor one that is undone before the body ends.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from pytest_emad import fixtures
from pytest_emad.installed import HOME

PACKAGES = ("emad_ref", "pytest_emad", "suites")
# whose decorators and generated methods may stand around a function of ours
LIBRARIES = frozenset({*sys.stdlib_module_names, *PACKAGES, "_pytest", "hypothesis", "numpy", "torch"})
# where a decorator keeps what it decorates
WRAPPED = {staticmethod: "__func__", classmethod: "__func__", property: "fget", cached_property: "func"}
MOST_LAYERS = 20  # of decorators
LONGEST = 60  # letters of a value in a message


@dataclass
class Source:
    """What one file defines at its top level, each name once.

    ``order``      names in the order in which they are bound
    ``imported``   name → (module of ours, name there)
    ``classes``    name → its methods
    ``constants``  name → value, where that is a plain literal
    """

    order: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


def replaced(item: pytest.Function) -> list[dict[str, str]]:
    """What ``item``, a shipped test whose body has just run, met in the place of ours: ``what``, and ``by`` what."""
    found = [*_fixtures(item), *_test(item), *_modules()]
    return [{"what": what, "by": by} for what, by in dict(found).items()]


def _fixtures(item: pytest.Function) -> Iterator[tuple[str, str]]:
    """Fixtures of ours that another definition hides, and arguments that are not what the fixture returned."""
    for name in item.fixturenames:
        if not name.startswith("emad_") or name not in vars(fixtures):
            continue
        definitions = item._fixtureinfo.name2fixturedefs.get(name, ())
        if definitions and not _made_in(definitions[-1].func, fixtures):
            yield f"fixture {name}", _place(definitions[-1].func)
        elif name in item.funcargs and item.funcargs[name] is not _returned(item, name):
            yield f"fixture {name}", f"an argument of type {type(item.funcargs[name]).__qualname__}"


def _returned(item: pytest.Function, name: str) -> Any:
    made = item._request._get_active_fixturedef(name).cached_result
    return None if made is None else made[0]


def _test(item: pytest.Function) -> Iterator[tuple[str, str]]:
    if not _made_in(item.obj, item.module):
        yield f"the body of {item.nodeid}", _place(item.obj)


def _modules() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        if _ours(name) and isinstance(module, ModuleType):
            yield from _module(name, module)


def _module(name: str, module: ModuleType) -> Iterator[tuple[str, str]]:
    file = getattr(module, "__file__", None)
    if file is None:
        if not hasattr(module, "__path__"):  # a folder without __init__.py has no file
            yield f"module {name}", "a module that has no file"
        return
    if not _in_our_tree(file):  # "suites" of a project that has nothing to do with us
        if name.partition(".")[0] != "suites":
            yield f"module {name}", file
        return
    source, held = _source(file), vars(module)
    unreached = _unreached(source, held)
    for each in source.functions:
        if each not in unreached and not _made_in(held.get(each), module, each):
            yield f"{name}.{each}", _place(held.get(each))
    for each, value in source.constants.items():
        if each not in unreached and not _same(held.get(each), value):
            yield f"{name}.{each}", repr(held.get(each))[:LONGEST]
    for each, (origin, there) in source.imported.items():
        if each in unreached:
            continue
        defined = vars(sys.modules[origin]).get(there) if origin in sys.modules else None
        if defined is not None and held.get(each) is not defined and not _same_module(held.get(each), defined):
            yield f"{name}.{each}", _place(held.get(each))
    for each, methods in source.classes.items():
        if each not in unreached:
            yield from _class(name, each, held.get(each), methods, module)


def _unreached(source: Source, held: dict[str, Any]) -> frozenset[str]:
    """Names below the line where a module left off, as ``pytest.importorskip`` makes it: they were never defined."""
    last = max((number for number, name in enumerate(source.order) if name in held), default=-1)
    return frozenset(source.order[last + 1 :])


def _class(name: str, each: str, value: Any, methods: Sequence[str], module: ModuleType) -> Iterator[tuple[str, str]]:
    if not isinstance(value, type) or value.__module__ != module.__name__ or value.__qualname__ != each:
        yield f"{name}.{each}", _place(value)
        return
    held = vars(value)
    for method in methods:
        if not _made_in(held.get(method), module, method):
            yield f"{name}.{each}.{method}", _place(held.get(method))
    for method, function in held.items():
        if method not in methods and isinstance(function, FunctionType) and not _of_a_library(function):
            yield f"{name}.{each}.{method}", _place(function)


def _made_in(value: Any, module: ModuleType, name: str | None = None) -> bool:
    """Whether ``value`` is the function ``name`` of ``module``, perhaps under decorators of libraries."""
    *outer, inner = _layers(value)
    own = isinstance(inner, FunctionType) and inner.__globals__ is vars(module) and name in (None, inner.__name__)
    return own and all(map(_of_a_library, outer))


def _layers(value: Any) -> list[Any]:
    """``value``, what it decorates, and so on to the innermost."""
    layers = [value]
    while len(layers) < MOST_LAYERS:
        held = vars(layers[-1]) if hasattr(layers[-1], "__dict__") else {}
        kept = WRAPPED.get(type(layers[-1]))
        inner = getattr(layers[-1], kept) if kept else held.get("__wrapped__", held.get("_fixture_function"))
        if not callable(inner):
            break
        layers.append(inner)
    return layers


def _of_a_library(layer: Any) -> bool:
    made = layer.__globals__.get("__name__", "") if isinstance(layer, FunctionType) else type(layer).__module__
    package = str(made).partition(".")[0]
    return package in LIBRARIES or package.startswith("hypothesis_temporary_module")  # which Hypothesis generates


def _same(value: Any, wanted: Any) -> bool:
    return type(value) is type(wanted) and bool(value == wanted)


def _same_module(value: Any, defined: Any) -> bool:
    """Whether both are the module of one file, imported twice: each is then checked by itself."""
    modules = isinstance(value, ModuleType) and isinstance(defined, ModuleType)
    return modules and value.__name__ == defined.__name__ and value.__file__ == defined.__file__


def _place(value: Any) -> str:
    """Where a replacement comes from: file and line of a function or class, else its value."""
    inner = next(
        (layer for layer in _layers(value) if isinstance(layer, FunctionType) and not _of_a_library(layer)), None
    )
    if inner is not None:
        return f"{inner.__code__.co_filename}:{inner.__code__.co_firstlineno} {inner.__qualname__}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    return "nothing" if value is None else repr(value)[:LONGEST]


@cache
def _in_our_tree(file: str) -> bool:
    """A path on ``sys.path`` may lead through a symbolic link, or on Windows through a short name."""
    return Path(file).resolve().is_relative_to(HOME)


@cache
def _source(file: str) -> Source:
    found = Source()
    body = ast.parse(Path(file).read_bytes()).body
    times = Counter(name for node in body for name in _bound(node))
    for node in body:
        found.order += _bound(node)
        if any(times[name] > 1 for name in _bound(node)):
            continue  # what is defined anew has no one definition
        if isinstance(node, ast.FunctionDef):
            found.functions.append(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = Counter(part.name for part in node.body if isinstance(part, ast.FunctionDef))
            found.classes[node.name] = [name for name, often in methods.items() if often == 1]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _ours(node.module or ""):
            found.imported |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            found.constants |= {name: node.value.value for name in _bound(node) if name.isupper()}
    return found


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES
