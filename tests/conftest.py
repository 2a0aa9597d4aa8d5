"""Tests marked ``slow`` (builds, benchmarks, error rates) run on request only; the reason of each skip says so."""

from __future__ import annotations

import ast
import gc
import os
import warnings
from functools import cache

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
    if config.getoption("--run-slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pass --run-slow, or see `tox -e slow`"))


def pytest_collection_finish() -> None:
    """Freeze imported and collected objects, which stay to the end, so that later garbage collections skip them."""
    gc.collect()
    gc.freeze()
