"""README is short, and its commands are those that ``.ci/run`` calls."""

from __future__ import annotations

import pytest

from tests.pages.blocks import ROOT, blocks

README = ROOT / "README.md"
if not README.is_file():
    pytest.skip("README.md is not part of an installed package", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")
LONGEST = 10 * 1024  # bytes: read in one sitting; what is longer stands in docs/


def test_it_is_read_in_one_sitting() -> None:
    assert len(TEXT.encode()) <= LONGEST


def test_the_first_command_and_the_tests_are_marked_for_ci() -> None:
    assert [block.mark for block in blocks(TEXT) if block.mark in ("main-job", "tests")] == ["main-job", "tests"]


def test_the_first_command_is_followed_by_what_it_prints() -> None:
    listed = [block.mark for block in blocks(TEXT)]
    assert listed[listed.index("main-job") + 1] == "output: emad-tiny"
