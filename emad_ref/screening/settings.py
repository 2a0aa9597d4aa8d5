"""What a screening is asked for, and how it divides its minutes: every phase is bounded before it starts.

Sizes follow from what one unit of work was timed to take on this machine; what was used in the end is on record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emad_ref.errors import BadArgument
from emad_ref.text.documents import CORPUS

LOSSES = (0.001, 0.01, 0.05)  # rises of perplexity that tables are about
# of the minutes; what is left is for reading, choosing and the tail of whatever took longer than it was timed to
SHARES = {"text": 0.05, "lens": 0.20, "traces": 0.10, "decoding": 0.40, "costs": 0.03, "drafts": 0.17}
CALIBRATED = 2  # windows to fit on for each one to choose or to judge on


@dataclass(frozen=True)
class Settings:
    """``corpus``, ``data``: text and the folder it lies in. ``documents``: to choose on, and as many each to certify
    and to judge on.

    ``minutes``: the whole is to take about so long at most. ``rise``: of perplexity that a recommendation may have at
    most, its upper bound. ``seed``: of what is held out and resampled.

    Raises:
        BadArgument: fewer than two documents, no time, a rise that is no fraction in 0–1.
    """

    corpus: str = CORPUS
    data: Path | None = None
    documents: int = 300
    minutes: float = 10.0
    rise: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.documents < 2:
            raise BadArgument("documents", self.documents, "at least 2", "one has no spread")
        if not 0 < self.minutes < math.inf:
            raise BadArgument("minutes", self.minutes, "a finite number > 0")
        if not 0 < self.rise < 1:
            raise BadArgument("rise", self.rise, "a fraction in 0–1, both excluded", "0.01 is 1 %")

    def seconds(self, phase: str) -> float:
        """What a phase of ``SHARES`` may take."""
        return SHARES[phase] * self.minutes * 60


def affordable(unit: Callable[[], object], seconds: float, most: int) -> int:
    """How many times ``unit``, run once to be timed, fits into ``seconds``; 1 … ``most``."""
    began = time.perf_counter()
    unit()
    each = time.perf_counter() - began
    return max(1, min(most, int(seconds / each))) if each > 0 else most
