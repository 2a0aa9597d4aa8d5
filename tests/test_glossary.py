"""The glossary names modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import emad_ref

ROOT = Path(emad_ref.__file__).parents[1]


def test_every_place_exists() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    places = re.findall(r"`([a-z_0-9/]+(?:/|\.py|\.toml))`", text)
    assert len(places) > 40
    missing = [place for place in places if not any((root / place).exists() for root in (ROOT, ROOT / "emad_ref"))]
    assert not missing
