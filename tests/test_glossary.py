"""The glossary has at most forty words, and the module named beside each word uses it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import emad_ref

ROOT = Path(emad_ref.__file__).parents[1]
PAGE = ROOT / "docs" / "glossary.md"
if not PAGE.is_file():
    pytest.skip("docs/ is not part of an installed package", allow_module_level=True)
WORDS = re.findall(r"^\| ([a-z ]+) \| .* \| `([\w/.]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_it_has_at_most_forty_words() -> None:
    rows = PAGE.read_text(encoding="utf-8").partition("## Words of this project")[2].count("\n| ")
    assert rows == len(WORDS) + 1, "every row has a word, a meaning and a module, and there is one heading"
    assert 20 < len(WORDS) <= 40


@pytest.mark.parametrize(("word", "place"), WORDS)
def test_the_module_named_uses_the_word(word: str, place: str) -> None:
    """``operating point`` is found in ``OperatingPoint`` and ``operating_points``, too."""
    path = next(
        path for path in (ROOT / place, ROOT / "emad_ref" / place, ROOT / "pytest_emad" / place) if path.exists()
    )
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert word.replace(" ", "") in re.sub(r"[\s_-]+", "", text).lower()
