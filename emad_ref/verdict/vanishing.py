"""From which batch size on is a method no faster any more? A first crossing, over the batch sizes that were timed.

    at b     each baseline's ratio of total times over the method, with its two-sided 95 % interval (``times``)
    shown    the gain is shown at b where the interval against *every* baseline lies above 1
    at       the gain vanishes at the smallest b at which it is not shown

Nobody knows beforehand which baseline is the fastest, so none is chosen by its mean: what is named at b is the baseline
against which the gain is least sure, the one whose interval reaches lowest. If that interval lies above 1 they all do,
an intersection–union test at 2.5 % whatever the number of baselines.

Nor does the number of batch sizes ask for a correction. They are gone through from the smallest on and the first that
fails ends it: a fixed sequence, in which the probability of calling any gain shown below ``at`` that is not there stays
at 2.5 % (Maurer, Hothorn and Lehmacher 1995). What comes after the crossing is listed and decides nothing.

Vanished is not "shown to be gone": an interval that holds 1 may hold it because few pairs were timed. So the sentence
has the interval and the number of pairs, and a crossing that noise made shows as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emad_ref.errors import BadArgument
from emad_ref.verdict.interval import Estimate


@dataclass(frozen=True)
class AtBatch:
    """``rows`` at once: how many times faster than ``against``, the baseline against which that is least sure."""

    rows: int
    against: str
    ratio: Estimate

    @property
    def shown(self) -> bool:
        """Whether the gain is, against every baseline."""
        return self.ratio.low > 1

    @property
    def said(self) -> str:
        """``0.97× [0.93, 1.01] against generate, 12 pairs``."""
        ratio = self.ratio
        interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
        return f"{ratio.value:.2f}× {interval} against {self.against}, {ratio.n} {ratio.noun}"


@dataclass(frozen=True)
class Vanishing:
    """``sweep``: every batch size timed, from the smallest on."""

    sweep: tuple[AtBatch, ...]

    @property
    def at(self) -> AtBatch | None:
        """The smallest at which the gain is not shown; None: it is shown at all of them."""
        return next((each for each in self.sweep if not each.shown), None)

    @property
    def again(self) -> tuple[int, ...]:
        """Batch sizes beyond the crossing whose interval lies above 1 all the same."""
        at = self.at
        return () if at is None else tuple(each.rows for each in self.sweep if each.rows > at.rows and each.shown)

    @property
    def said(self) -> str:
        """One sentence: at which batch size, by which ratio; or that there was no gain, or that it never ended."""
        at, largest = self.at, self.sweep[-1]
        if at is None:
            return f"still faster at batch {largest.rows}: {largest.said}"
        first = at is self.sweep[0]
        head = f"no gain at batch {at.rows} already" if first else f"gain vanishes at batch {at.rows}"
        beyond = f" (shown at batch {', '.join(map(str, self.again))} all the same)" if self.again else ""
        return f"{head}: {at.said}{beyond}"


def vanishing(ratios: Mapping[int, Mapping[str, Estimate]]) -> Vanishing:
    """Where the gain ends: batch size → baseline → how many times faster than it the method is (> 1: faster).

    Raises:
        BadArgument: no batch size, or one without a baseline.
    """
    if not ratios:
        raise BadArgument("ratios", dict(ratios), "at least one batch size")
    for rows, against in ratios.items():
        if not against:
            raise BadArgument(f"ratios[{rows}]", dict(against), "at least one baseline", "time one beside the method")
    return Vanishing(tuple(_least_sure(rows, ratios[rows]) for rows in sorted(ratios)))


def _least_sure(rows: int, against: Mapping[str, Estimate]) -> AtBatch:
    name = min(against, key=lambda each: (against[each].low, against[each].value))
    return AtBatch(rows, name, against[name])
