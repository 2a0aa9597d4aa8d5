"""Tests marked ``slow`` (builds, benchmarks, error rates) run on request only; the reason of each skip says so.

Of a test marked ``each_value`` as few parameter sets run as hold each value of each parameter once, of one marked
``values`` those with one of the named values; the others are slow.
"""

from __future__ import annotations

import ast
import gc
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from _pytest._code import code

# Set before torch is imported, and for child processes: tiny models run several times slower on a thread pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@cache
def parsed(source: str) -> ast.AST:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(source, "source", "exec")


def pytest_configure() -> None:
    """Cache parsed sources: hundreds of inner runs fail, and pytest parses about twenty modules for each traceback."""
    find = code.getstatementrange_ast
    if find.__module__ != __name__:
        code.getstatementrange_ast = lambda line, source, assertion=False, astnode=None: find(
            line, source, assertion, astnode or parsed(str(source))
        )


def pytest_sessionstart() -> None:
    """Change Hypothesis's profile in force: a slow machine is no fault. Test modules are imported later."""
    from hypothesis import HealthCheck, settings

    timeless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(settings.get_current_profile_name(), timeless)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-slow", action="store_true", help="also run tests marked slow (tox -e slow, wheel, rates and docs do)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    several: dict[str, list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec") or item.get_closest_marker("slow"):
            continue
        named = item.get_closest_marker("values")
        if named and not any(value in named.args for value in item.callspec.params.values() if isinstance(value, str)):
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("each_value"):
            several.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for sets in several.values():
        chosen = choose_each_value([set(enumerate(item.callspec._idlist)) for item in sets])
        for number in set(range(len(sets))) - chosen:
            sets[number].add_marker(pytest.mark.slow)
    if config.getoption("--run-slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pass --run-slow, or see `tox -e slow`"))


def choose_each_value(sets: Sequence[set[tuple[int, str]]]) -> set[int]:
    """Numbers of as few of ``sets`` as hold each of their elements, chosen greedily, the first of equals.

    >>> sorted(choose_each_value([{(0, a), (1, b)} for a in "xy" for b in "uvw"]))
    [0, 2, 4]
    """
    missing, chosen = set().union(*sets), set()
    while missing:
        best = max(range(len(sets)), key=lambda number: len(sets[number] & missing))
        chosen.add(best)
        missing -= sets[best]
    return chosen


_frozen_before = set[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Freeze what is imported, collected and loaded by a module's fixtures, so that later garbage collections skip it.

    Whatever times a decoder collects garbage before.
    """
    if item.path not in _frozen_before:
        _frozen_before.add(item.path)
        gc.collect()
        gc.freeze()
