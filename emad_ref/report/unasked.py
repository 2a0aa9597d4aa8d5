"""What a run was not asked, and why: left out on request or by its size, which is neither missing nor a failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ABOVE = "above the budget"
NO_PAIR = "no pair was named"
NO_EXIT = "no exit was brought"  # not told: nothing is missing where nobody has one
LEFT_OUT = "left out by --emad-only"

LISTED = 12  # claims that are named; more are counted
WORDS = {
    LEFT_OUT: LEFT_OUT,
    NO_PAIR: f"not applicable: {NO_PAIR}; --emad-pair SMALL,LARGE",
    ABOVE: "gate nothing and take long; asked with --emad-all-claims or a larger --emad-budget",
}


def told(deselected: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each reason, with the claims it concerns. ``deselected``: as ``report.json`` has them."""
    entries = list(deselected)
    for why, words in WORDS.items():
        left = [entry for entry in entries if entry["why"] == why]
        claims = list(dict.fromkeys(entry["claim"] for entry in left if entry["claim"]))
        others = sum(not entry["claim"] for entry in left)
        named = ", ".join(claims) if len(claims) <= LISTED else f"{len(claims)} claims"
        parts = [named] if claims else []
        parts += [f"{others} test{'s' if others > 1 else ''} of no claim"] if others else []
        if parts:
            yield f"{' and '.join(parts)}: {words}"
