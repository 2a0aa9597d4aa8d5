"""Stops the run if the plugin is not loaded: without it every test would fail for lack of fixtures."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Done at this hook because with ``--pyargs`` pytest finds this file only together with the tests beside it."""
    if not config.pluginmanager.has_plugin("emad-fixtures"):
        raise pytest.UsageError(
            "the suites of pytest-emad need its plugin, which is not loaded: leave -p no:emad out, or, where plugins "
            "are not loaded by themselves (PYTEST_DISABLE_PLUGIN_AUTOLOAD), add -p pytest_emad.plugin"
        )
