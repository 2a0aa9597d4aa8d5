"""Where a run of our suites may leave files: in pytest's own cache, or, where that is off, nowhere.

Hypothesis and pytest-benchmark each make a folder where the command was typed; none of it is asked for here.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

STORAGE = "HYPOTHESIS_STORAGE_DIRECTORY"
BENCHMARKS = "file://./.benchmarks"  # where pytest-benchmark stores, unless told


def keep_together(config: pytest.Config) -> None:
    """Before pytest-benchmark is configured, and before Hypothesis is imported. What a user chose stays as it is."""
    options = config.option
    stores = any(getattr(options, f"benchmark_{name}", None) for name in ("save", "autosave", "compare"))
    if getattr(options, "benchmark_storage", None) == BENCHMARKS and not stores:
        options.benchmark_storage = f"file://{_folder(config, 'benchmarks')}"
    if not os.environ.get(STORAGE):
        os.environ[STORAGE] = str(_folder(config, "hypothesis"))
        config.add_cleanup(_forget)


def _forget() -> None:
    os.environ.pop(STORAGE, None)


def _folder(config: pytest.Config, name: str) -> Path:
    cache = getattr(config, "cache", None)
    if cache is not None and os.access(config.rootpath, os.W_OK):
        found: Path = cache.mkdir(f"emad-{name}")
        return found
    temporary = TemporaryDirectory(prefix=f"emad-{name}-", ignore_cleanup_errors=True)
    config.add_cleanup(temporary.cleanup)
    return Path(temporary.name)
