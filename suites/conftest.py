"""Without the plugin a suite has no fixtures, and each of its tests would fail for another reason."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Here, because with ``--pyargs`` this file is found no sooner than the tests beside it."""
    if not config.pluginmanager.has_plugin("emad-fixtures"):
        raise pytest.UsageError(
            "the suites of pytest-emad need its plugin, which is not loaded: leave -p no:emad out, or, where plugins "
            "are not loaded by themselves (PYTEST_DISABLE_PLUGIN_AUTOLOAD), add -p pytest_emad.plugin"
        )
