"""Timed arms as strips: how many times as fast, with the interval, on one scale on which 1 is no faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emad_ref.report.reading import Report
from emad_ref.verdict import numbers

TIMED = "as fast"  # in the unit of a ratio of times
WIDTH = 220  # pixels of a strip


@dataclass(frozen=True)
class Strip:
    """``at``, ``low``, ``high`` and ``one``, the place of 1, in pixels from the left; the last two absent without an
    interval. ``outcome`` of the leg."""

    claim: str
    model: str
    name: str
    outcome: str
    ratio: str
    interval: str
    pairs: str
    at: float
    low: float | None
    high: float | None
    one: float


def timings(report: Report) -> list[Strip]:
    """One for each timed leg of every verdict, in the order of the report."""
    legs = [
        (claim, leg)
        for claim in report["claims"]
        for leg in claim["legs"]
        if TIMED in leg["unit"] and leg["estimate"] is not None
    ]
    known = [bound for _, leg in legs for bound in (leg["estimate"], *(leg["interval"] or ())) if bound is not None]
    most = 1.05 * max([1.0, *known])
    return [_strip(claim, leg, most) for claim, leg in legs]


def _strip(claim: Mapping[str, Any], leg: Mapping[str, Any], most: float) -> Strip:
    def place(ratio: float | None) -> float | None:
        return None if ratio is None else round(WIDTH * ratio / most, 1)

    low, high = leg["interval"] or (None, None)
    return Strip(
        claim=claim["id"],
        model=claim["model"],
        name=leg["name"],
        outcome=leg["outcome"],
        ratio=numbers.ratio(leg["estimate"]),
        interval=numbers.interval(leg["interval"], leg["unit"]),
        pairs=numbers.count(leg["n"]),
        at=WIDTH * leg["estimate"] / most,
        low=place(low),
        high=place(high),
        one=WIDTH / most,
    )
