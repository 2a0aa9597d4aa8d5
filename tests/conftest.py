"""``slow`` tests build distributions, or measure speed or error rates: they run on request only, and say so."""

from __future__ import annotations

import gc
import os

import pytest

# Before torch is imported, and for child processes too: tiny models on a pool of threads run several times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
    """What was imported and collected stays to the end: no later collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()
