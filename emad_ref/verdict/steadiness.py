"""What of paired times is the machine's doing: single interruptions, and spells that last over many pairs.

**Interruptions.** One pair in twenty of which one arm takes ten times as long moves a ratio of totals by more than any
claim asks for. ``interruptions`` finds pairs whose log ratio lies far from the others', and tells by the counts on
either side what they may be: the machine strikes either arm equally, an arm that really is slow on some requests is
slow on its own side only.

**Spells.** Paired times are no independent draws: a neighbour comes and goes, a clock frequency wanders, and arms need
not feel it alike. ``steadiness`` measures what a run shows of it:

    lag_one   correlation of neighbouring pairs' log ratios (with Kendall's correction for its bias)
    drift     KPSS statistic of the log ratios: how far their partial sums stray from a straight line. Of 1 / 6 on
              average where pairs are independent, above 0.46 one time in twenty (Kwiatkowski et al. 1992); against a
              random walk below independent noise no test is locally better (Nyblom and Mäkeläinen 1983)
    shared    the same of the time that both arms take together: the machine's own speed. Where that wanders, arms
              that feel it unequally are likely, and a ratio shows it later than the times do

``inflation`` multiplies squared standard errors of the ratio. It is never below ``UNSEEN``: a random walk that moves
the mean as much as independent noise does goes unnoticed in five runs of six. ``times`` takes the least sure of pairs,
blocks of time and processes on top. False verdicts at the threshold then stay below 6 % each way in all but a few of
the shapes that ``tests/laws/timing_noise.py`` simulates; docs/methods.md has the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from emad_ref.record import Bools, Floats

UNSEEN = 2.0  # factor of the squared error in every run
DRIFT, DRIFT_FROM = 15.0, 0.15  # by how much it grows with ``drift``, and from which on
SHARED, SHARED_FROM, SHARED_FULL = 8.0, 0.5, 0.9  # and with ``shared``, and where that ends
STRAYS = 0.463  # KPSS: exceeded by one steady run in twenty
LAG = 2.33  # standard errors of a correlation of neighbours that one steady run in a hundred exceeds
FARTHEST = 0.98  # a correlation nearer to 1 than that leaves no independent pair to speak of

MAD = 0.6745  # median absolute deviation of a standard normal variable
STRUCK = math.log(2.0)  # least distance of an interrupted pair's log ratio from the median
STRUCK_SPREADS = 8.0  # and in robust standard deviations, so that wide noise has no interruptions
OWN = 0.1  # p-value of equal chances for either arm below which interruptions are an arm's own


@dataclass(frozen=True)
class Steadiness:
    """Of so many ``pairs``: ``lag_one``, ``drift`` and ``shared`` as above."""

    pairs: int
    lag_one: float
    drift: float
    shared: float

    @property
    def inflation(self) -> float:
        """Factor of the squared standard error of a ratio, ≥ ``UNSEEN``."""
        wandering = np.clip((self.shared - SHARED_FROM) / (SHARED_FULL - SHARED_FROM), 0.0, 1.0)
        return UNSEEN + DRIFT * max(0.0, self.drift - DRIFT_FROM) + SHARED * float(wandering)

    @property
    def independent(self) -> int:
        """About how many independent pairs would know the mean as well, by ``lag_one``."""
        kept = (1 - self.lag_one) / (1 + self.lag_one)
        return max(1, min(self.pairs, round(self.pairs * kept)))

    @property
    def unsteady(self) -> str:
        """How the run shows that its machine was not steady, in words; "" where it does not."""
        shown = []
        if self.lag_one * math.sqrt(self.pairs) > LAG:
            shown.append(
                f"pairs that follow one another are alike (correlation {self.lag_one:.2f}; {self.pairs} pairs are "
                f"worth about {self.independent} independent ones)"
            )
        if self.drift > STRAYS:
            shown.append("the ratio of the arms drifts over the run")
        if self.shared > (SHARED_FROM + SHARED_FULL) / 2:
            shown.append("the machine's speed drifts over the run")
        return f"unsteady machine: {', and '.join(shown)}" if shown else ""


def steadiness(a: Floats, b: Floats) -> Steadiness:
    """Of pairs [n] in the order in which they were taken, n ≥ 2; times > 0."""
    ratio, together = np.log(a / b), np.log(a) + np.log(b)
    return Steadiness(len(a), _lag_one(ratio), _kpss(ratio), _kpss(together))


def _lag_one(values: Floats) -> float:
    n, away = len(values), values - values.mean()
    if n < 4 or not away.any():
        return 0.0
    found = float(away[1:] @ away[:-1] / (away @ away))
    return max(-FARTHEST, min(FARTHEST, (n * found + 1) / (n - 3)))


def _kpss(values: Floats) -> float:
    n, away = len(values), values - values.mean()
    squared = float(away @ away)
    return float((np.cumsum(away) ** 2).sum() / (n * squared)) if squared > 0 else 0.0


@dataclass(frozen=True)
class Interruptions:
    """[pairs] of which ``a`` or ``b`` took far longer than the other pairs lead to expect."""

    a: Bools
    b: Bools

    @property
    def either(self) -> Bools:
        return np.asarray(self.a | self.b)

    @property
    def counts(self) -> tuple[int, int]:
        return int(self.a.sum()), int(self.b.sum())

    @property
    def own(self) -> bool:
        """Whether one arm was struck significantly more often than the other: it is slow by its nature."""
        struck = sum(self.counts)
        return struck > 0 and float(stats.binomtest(self.counts[0], struck).pvalue) < OWN

    @property
    def of_machine(self) -> tuple[bool, bool]:
        """Of ``a`` and of ``b``: whether what struck it is no more than what struck the other, and one deviation."""
        a, b = self.counts
        return 0 < a <= b + math.sqrt(b), 0 < b <= a + math.sqrt(a)

    @property
    def counted(self) -> tuple[Bools, Bools, Bools]:
        """[pairs] that count for the ratio, for what shows it to lie above a threshold, and for what shows it below.

        Slow pairs of ``a`` raise the ratio a / b, so that without them it is harder to show high; those of ``b``
        lower it, and are left out there only where the machine's blows explain them.
        """
        every = np.ones(len(self.a), dtype=np.bool_)
        if self.own or not self.either.any():
            return every, every, every
        machine_a, machine_b = self.of_machine
        rest = ~self.either
        if machine_a and machine_b:
            return rest, rest, rest
        return every, rest if machine_b else ~self.a, rest if machine_a else ~self.b

    def note(self, ratio: float) -> str:
        """What became of such pairs, in words; "" where there are none.

        ``ratio``: of all pairs, the baseline ``a`` over the candidate ``b``.
        """
        struck, (a, b) = int(self.either.sum()), self.counts
        if not struck:
            return ""
        said = f"{struck} of {len(self.a)} pairs lie far from the others ({a} by the baseline, {b} by the candidate)"
        if self.own:
            return f"{said}: the {'baseline' if a > b else 'candidate'} is slow at times, and they count"
        if all(self.of_machine):
            return f"{said} and are set aside as interrupted; {ratio:.4g}× with them"
        return f"{said}: interrupted, or an arm that is slow at times"


def interruptions(a: Floats, b: Floats) -> Interruptions:
    """Pairs [n] whose log ratio lies ``STRUCK_SPREADS`` robust standard deviations and a factor of 2 from the median.

    None where more than half of all ratios are the same: that is no noise to compare with.
    """
    logs = np.log(a / b)
    away = logs - np.median(logs)
    spread = float(np.median(np.abs(away))) / MAD
    least = max(STRUCK, STRUCK_SPREADS * spread) if spread > 0 else math.inf
    return Interruptions(away > least, away < -least)
