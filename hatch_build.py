"""Build hook: suites and golden data travel inside the package, in real wheels only.

A static ``force-include`` would also act on editable installs and leave stale copies there; symbolic links drop
``golden/`` without a word.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = {"suites": "pytest_emad/suites", "golden": "pytest_emad/golden"}


class ShipSuites(BuildHookInterface):  # type: ignore[type-arg]  # the parameter is hatchling's own, of no use here
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders unless this is an editable build; hatchling refuses a folder that does not exist."""
        if version != "editable":
            build_data["force_include"].update(SHIPPED)
