"""Whose decoder a run judged, from what became of each provider, entries of ``decoder.providers`` in a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ANSWERED, DECLINED, NONE = "answered", "declined", "none"
CAME_OF_IT = (ANSWERED, DECLINED, NONE)
FEATURES = "features"  # of a request beyond a greedy run at full depth → [answered, declined]
EXITS, SAMPLING = "exits", "sampling"


def together(parts: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What several processes counted, as if one had."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for provider in part:
            empty = {**dict.fromkeys(CAME_OF_IT, 0), FEATURES: {}}
            known = found.setdefault(provider["plugin"], dict(provider) | empty)
            for what in CAME_OF_IT:
                known[what] += provider[what]
            for feature, counts in provider.get(FEATURES, {}).items():
                before = known[FEATURES].get(feature, (0, 0))
                known[FEATURES][feature] = [one + other for one, other in zip(before, counts, strict=True)]
    return list(found.values())


def not_offered(asked: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Features that the foreign providers declined whenever they were asked, and never answered.

    One that is declined here and answered there is offered: a decoder cannot decline its hard cases alone.
    """
    features = [provider.get(FEATURES, {}) for provider in asked if provider["foreign"]]
    answered = {name for each in features for name, (answers, _) in each.items() if answers}
    return frozenset(name for each in features for name in each) - answered


def whose(asked: Iterable[Mapping[str, Any]]) -> str:
    """The decoder under test in words: who answered, or who is going to be asked first."""
    asked = list(asked)
    names = [provider["name"] for provider in asked if provider[ANSWERED] or provider[DECLINED]]
    return " and ".join(names or [provider["name"] for provider in asked[:1]])
