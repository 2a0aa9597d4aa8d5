"""Command-line options and their ini twins.

table    one row per option: how it is called, how its text is read, what it is by default
asked    what a run was asked to do, as plain data
reading  from the one to the other, validated before a model is loaded
"""

from __future__ import annotations

from pytest_emad.options.asked import Settings
from pytest_emad.options.reading import register, settings
from pytest_emad.options.table import OPTIONS, add_options

__all__ = ["OPTIONS", "Settings", "add_options", "register", "settings"]
