"""Detection of replaced parts of the judge: fixtures, functions, classes, methods and constants of the project.

A run with replaced audits is no evidence about a decoder, even if all tests pass. So at the end of the body of each
shipped test, this module compares the project's loaded modules with their source, parsed once: a definition must be
from its own module, and an imported name must be the object of its defining module. The check does not see a change
inside a library, or one that is undone before the body ends.
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
from pytest_emad.environment import SOURCE_ROOT

PACKAGES = ("emad_ref", "pytest_emad", "suites")
# libraries whose decorators and generated methods may wrap the project's functions
LIBRARIES = frozenset({*sys.stdlib_module_names, *PACKAGES, "_pytest", "hypothesis", "numpy", "torch"})
# attributes in which a decorator keeps the decorated object
DECORATED_ATTRIBUTE = {staticmethod: "__func__", classmethod: "__func__", property: "fget", cached_property: "func"}
MAX_DECORATORS = 20  # most layers of decorators
MAX_VALUE_LENGTH = 60  # most letters of a value in a message


@dataclass
class ModuleTopLevelNames:
    """Names defined at the top level of one file.

    ``order``      names in the order of their binding
    ``imported``   name → (module of the project, name there)
    ``classes``    name → its methods
    ``constants``  name → value, if a plain literal
    """

    order: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


def find_replaced_code(item: pytest.Function) -> list[dict[str, str]]:
    """Code of the project replaced during ``item``, a shipped test: ``what``, and its replacement ``by``."""
    found = [*_replaced_fixtures(item), *_replaced_test_body(item), *_replaced_in_modules()]
    return [{"what": what, "by": by} for what, by in dict(found).items()]


def _replaced_fixtures(item: pytest.Function) -> Iterator[tuple[str, str]]:
    """Fixtures of the project hidden by another definition, and arguments that differ from the fixture's result."""
    for name in item.fixturenames:
        if not name.startswith("emad_") or name not in vars(fixtures):
            continue
        definitions = item._fixtureinfo.name2fixturedefs.get(name, ())
        if definitions and not _is_defined_in(definitions[-1].func, fixtures):
            yield f"fixture {name}", _origin(definitions[-1].func)
        elif name in item.funcargs and item.funcargs[name] is not _fixture_value(item, name):
            yield f"fixture {name}", f"an argument of type {type(item.funcargs[name]).__qualname__}"


def _fixture_value(item: pytest.Function, name: str) -> Any:
    made = item._request._get_active_fixturedef(name).cached_result
    return None if made is None else made[0]


def _replaced_test_body(item: pytest.Function) -> Iterator[tuple[str, str]]:
    if not _is_defined_in(item.obj, item.module):
        yield f"the body of {item.nodeid}", _origin(item.obj)


def _replaced_in_modules() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        if _is_our_module(name) and isinstance(module, ModuleType):
            yield from _replaced_in_module(name, module)


def _replaced_in_module(name: str, module: ModuleType) -> Iterator[tuple[str, str]]:
    file = getattr(module, "__file__", None)
    if file is None:
        if not hasattr(module, "__path__"):  # a folder without __init__.py has no file
            yield f"module {name}", "a module that has no file"
        return
    if not _is_our_file(file):  # "suites" of an unrelated project
        if name.partition(".")[0] != "suites":
            yield f"module {name}", file
        return
    source, held = _definitions(file), vars(module)
    unreached = _undefined_names(source, held)
    for each in source.functions:
        if each not in unreached and not _is_defined_in(held.get(each), module, each):
            yield f"{name}.{each}", _origin(held.get(each))
    for each, value in source.constants.items():
        if each not in unreached and not _equals_constant(held.get(each), value):
            yield f"{name}.{each}", repr(held.get(each))[:MAX_VALUE_LENGTH]
    for each, (origin, there) in source.imported.items():
        if each in unreached:
            continue
        defined = vars(sys.modules[origin]).get(there) if origin in sys.modules else None
        if defined is not None and held.get(each) is not defined and not _is_same_module(held.get(each), defined):
            yield f"{name}.{each}", _origin(held.get(each))
    for each, methods in source.classes.items():
        if each not in unreached:
            yield from _replaced_in_class(name, each, held.get(each), methods, module)


def _undefined_names(source: ModuleTopLevelNames, held: dict[str, Any]) -> frozenset[str]:
    """Names that a module never defined, because it stopped earlier, as by ``pytest.importorskip``."""
    last = max((number for number, name in enumerate(source.order) if name in held), default=-1)
    return frozenset(source.order[last + 1 :])


def _replaced_in_class(
    name: str, each: str, value: Any, methods: Sequence[str], module: ModuleType
) -> Iterator[tuple[str, str]]:
    if not isinstance(value, type) or value.__module__ != module.__name__ or value.__qualname__ != each:
        yield f"{name}.{each}", _origin(value)
        return
    held = vars(value)
    for method in methods:
        if not _is_defined_in(held.get(method), module, method):
            yield f"{name}.{each}.{method}", _origin(held.get(method))
    for method, function in held.items():
        if method not in methods and isinstance(function, FunctionType) and not _is_library_layer(function):
            yield f"{name}.{each}.{method}", _origin(function)


def _is_defined_in(value: Any, module: ModuleType, name: str | None = None) -> bool:
    """Whether ``value`` is the function ``name`` of ``module``, possibly under decorators of libraries."""
    plain = type(value) is FunctionType and not value.__dict__  # nearly all; computed after each test for each name
    *outer, inner = [value] if plain else _decorator_layers(value)
    own = isinstance(inner, FunctionType) and inner.__globals__ is vars(module) and name in (None, inner.__name__)
    return own and all(map(_is_library_layer, outer))


def _decorator_layers(value: Any) -> list[Any]:
    """``value``, its decorated object, and so on to the innermost."""
    layers = [value]
    while len(layers) < MAX_DECORATORS:
        held = vars(layers[-1]) if hasattr(layers[-1], "__dict__") else {}
        kept = DECORATED_ATTRIBUTE.get(type(layers[-1]))
        inner = getattr(layers[-1], kept) if kept else held.get("__wrapped__", held.get("_fixture_function"))
        if not callable(inner):
            break
        layers.append(inner)
    return layers


def _is_library_layer(layer: Any) -> bool:
    made = layer.__globals__.get("__name__", "") if isinstance(layer, FunctionType) else type(layer).__module__
    package = str(made).partition(".")[0]
    return package in LIBRARIES or package.startswith("hypothesis_temporary_module")  # generated by Hypothesis


def _equals_constant(value: Any, wanted: Any) -> bool:
    return type(value) is type(wanted) and bool(value == wanted)


def _is_same_module(value: Any, defined: Any) -> bool:
    """Whether both are modules of the same file, imported twice, which are checked separately."""
    modules = isinstance(value, ModuleType) and isinstance(defined, ModuleType)
    return modules and value.__name__ == defined.__name__ and value.__file__ == defined.__file__


def _origin(value: Any) -> str:
    """Origin of a replacement: file and line of a function or class, else its value."""
    inner = next(
        (
            layer
            for layer in _decorator_layers(value)
            if isinstance(layer, FunctionType) and not _is_library_layer(layer)
        ),
        None,
    )
    if inner is not None:
        return f"{inner.__code__.co_filename}:{inner.__code__.co_firstlineno} {inner.__qualname__}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    return "nothing" if value is None else repr(value)[:MAX_VALUE_LENGTH]


@cache
def _is_our_file(file: str) -> bool:
    """Whether ``file`` is the project's, also through a symbolic link or a short Windows name on ``sys.path``."""
    return Path(file).resolve().is_relative_to(SOURCE_ROOT)


@cache
def _definitions(file: str) -> ModuleTopLevelNames:
    found = ModuleTopLevelNames()
    body = ast.parse(Path(file).read_bytes()).body
    times = Counter(name for node in body for name in _bound_names(node))
    for node in body:
        found.order += _bound_names(node)
        if any(times[name] > 1 for name in _bound_names(node)):
            continue  # a redefined name has no single definition
        if isinstance(node, ast.FunctionDef):
            found.functions.append(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = Counter(part.name for part in node.body if isinstance(part, ast.FunctionDef))
            found.classes[node.name] = [name for name, often in methods.items() if often == 1]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_our_module(node.module or ""):
            found.imported |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            found.constants |= {name: node.value.value for name in _bound_names(node) if name.isupper()}
    return found


def _bound_names(node: ast.stmt) -> list[str]:
    """The names that a top-level statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_our_module(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES
