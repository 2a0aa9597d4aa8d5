"""README is short, and ``.ci/run`` runs its commands."""

from __future__ import annotations

import re
from importlib.metadata import metadata

import pytest

from tests.pages.blocks import ROOT, blocks

README = ROOT / "README.md"
if not README.is_file():
    pytest.skip("README.md is not part of an installed package", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")
LONGEST = 10 * 1024  # bytes, for one sitting; longer text belongs in docs/


def test_it_is_read_in_one_sitting() -> None:
    assert len(TEXT.encode()) <= LONGEST


def test_an_index_shows_paths_where_the_page_has_relative_links() -> None:
    """Built from the sources if hatchling is installed; else read from the installation, which was made from them."""
    try:
        from hatchling.metadata.core import ProjectMetadata
        from hatchling.plugin.manager import PluginManager
    except ImportError:
        shown = str(metadata("pytest-emad").get_payload())
    else:
        shown = ProjectMetadata(str(ROOT), PluginManager()).core.readme
    assert "Install (docs/install.md)" in shown
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_first_command_and_the_tests_are_marked_for_ci() -> None:
    assert [block.mark for block in blocks(TEXT) if block.mark in ("main-job", "tests")] == ["main-job", "tests"]


def test_the_first_command_is_followed_by_what_it_prints() -> None:
    listed = [block.mark for block in blocks(TEXT)]
    assert listed[listed.index("main-job") + 1] == "output: emad-tiny"
