"""Whose decoder a run judged, from what became of each provider, entries of ``decoder.providers`` in a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ANSWERED, DECLINED, NONE = "answered", "declined", "none"
CAME_OF_IT = (ANSWERED, DECLINED, NONE)


def together(parts: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What several processes counted, as if one had."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for provider in part:
            known = found.setdefault(provider["plugin"], dict(provider) | dict.fromkeys(CAME_OF_IT, 0))
            for what in CAME_OF_IT:
                known[what] += provider[what]
    return list(found.values())


def whose(asked: Iterable[Mapping[str, Any]]) -> str:
    """The decoder under test in words: who answered, or who is going to be asked first."""
    asked = list(asked)
    names = [provider["name"] for provider in asked if provider[ANSWERED] or provider[DECLINED]]
    return " and ".join(names or [provider["name"] for provider in asked[:1]])
