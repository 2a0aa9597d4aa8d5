"""The batch sizes beside those that decide: the same race from fewer pairs, to see where a gain ends.

Arithmetic that one row leaves idle hides what a method spends; more rows leave less of it idle. So at ``standard`` and
above the batch sizes 1, 2, 4, 8, 16 are all timed. Those of the budget decide, as ever, from all of its pairs, and
serve the sweep too. The others are timed here and decide nothing: as legs that decide they would only make Holm's
family larger, and each of them would want 30 pairs.

``PAIRS`` 12: where pairs vary by 7 %, as on a machine that does little else, 12 leave an interval of ± 4.5 %, so that a
gain of 10 %, which EMAD-F2 asks for, is told from none. Two more batch sizes, of 12 pairs and 2 of warm-up each, add a
seventeenth to the requests of ``standard``, which times three of 120 behind 40 of warm-up.
"""

from __future__ import annotations

from emad_ref.audit.finding import Finding
from emad_ref.evidence.stopwatch import Requests, Stopwatch
from emad_ref.evidence.study import BUDGETS, Budget
from emad_ref.point import OperatingPoint

BATCHES = (1, 2, 4, 8, 16)
PAIRS = 12
LEAST = BUDGETS["standard"]  # the smallest budget that sweeps


def beside(budget: Budget) -> tuple[int, ...]:
    """Of ``BATCHES`` those that ``budget`` does not decide at; none below ``standard``."""
    return () if budget.rank < LEAST.rank else tuple(rows for rows in BATCHES if rows not in budget.batch_sizes)


class Swept:
    """Of the decoder under test, timed when first asked for and kept."""

    def __init__(self, stopwatch: Stopwatch, budget: Budget):
        self._stopwatch, self._batches = stopwatch, beside(budget)
        self._timed: dict[OperatingPoint, dict[int, Requests]] = {}

    def timed(self, point: OperatingPoint) -> dict[int, Requests]:
        """Batch size → the arms of ``Stopwatch.timed``, from ``PAIRS`` pairs."""
        if point not in self._timed:
            watch = self._stopwatch
            self._timed[point] = {rows: watch.race(point, rows, watch.drawn(rows, PAIRS)) for rows in self._batches}
        return self._timed[point]

    def checked(self, point: OperatingPoint, rows: int) -> Finding:
        """As ``Stopwatch.checked``."""
        return self._stopwatch.looked_through(self.timed(point)[rows], point, rows)
