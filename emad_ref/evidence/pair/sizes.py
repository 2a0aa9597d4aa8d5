"""How many items, documents and timed requests a pair is given at each budget."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Items per task: on which models are compared, on which rules are tried, and on which verdicts rest.

    No rule is chosen on fewer than 60 (METHODS, "EAD rules"), and 100 judged items are the least that falsify.

    ``thresholds``: tried with either model first; ``calibrate``: documents behind EMAD's thresholds of either model;
    ``reported``: pairs of a row that only reports.
    """

    compared: int
    tried: int
    thresholds: int
    judged: int
    calibrate: int
    reported: int


SIZES: dict[str, Sizes] = {
    "smoke": Sizes(60, 60, 7, 120, 30, 8),
    "standard": Sizes(200, 120, 15, 300, 100, 30),
    "full": Sizes(400, 150, 15, 800, 300, 60),
}
