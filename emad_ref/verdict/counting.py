"""Whether a task counts at an operating point: one definition for every row, selection and table that speaks of tasks.

    solved      right answers at full depth beat the honest guess, shown at 5 %, by at least a point
    exercised   the point saves at least 5 % of the decode FLOPs of the task's own sequences, net

A task that is not solved has nothing to lose; one that is not exercised cannot lose it, for full depth answers in both
arms. Either would let a claim about quality survive without having been asked, so neither takes part, and both are
listed with the numbers (METHODS, "Decision rules": "A task counts at a point"). The honest guess is the best that
somebody does who cannot solve the task: from the input's own symbols, or the answer that is most frequent elsewhere.

The guess is beaten by an exact binomial test. Where items share a cluster it is taken at the effective number of items,
n / deff (Korn and Graubard 1998, *Survey Methodology* 24, 193–201): repeats of one item count once.

This module knows no model, no trace and no claim: who measures stands in ``evidence``, who decides in ``questions``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special, stats

from emad_ref.errors import BadArgument
from emad_ref.verdict.legs import LEVEL
from emad_ref.verdict.units import ByItem

LEAST_SAVED = 0.05  # net share of a task's own decode FLOPs from which the rule is said to act on it
AT_STAKE = 0.01  # above the guess: F1 speaks of one point, and a task with less cannot lose it
FEWEST = 2  # counting tasks, for a claim about accuracy to survive: F1 speaks of "two or more tasks"


@dataclass(frozen=True)
class TaskAt:
    """One task at one operating point.

    ``full``      [items] bool, right at full depth; ``adaptive``: right at the point, the same items in the same order.
    ``guess``     share that an honest guess gets right, 0–1.
    ``saving``    net share of the decode FLOPs of the task's own sequences that the point saves; negative where
                  deciding costs more than it saves.

    Raises:
        BadArgument: a guess that is no share, or a saving that is none.

    >>> nobody = ByItem.distinct(np.zeros(4, dtype=bool))
    >>> TaskAt(nobody, nobody, guess=0.25, saving=0.004).standing
    'not solved: 0.0 % right, 25.0 % by guessing; not exercised: saves 0.4 %'
    """

    full: ByItem
    adaptive: ByItem
    guess: float
    saving: float

    def __post_init__(self) -> None:
        if not 0 <= self.guess <= 1:
            raise BadArgument("guess", self.guess, "a share, 0–1")
        if not self.saving <= 1:
            raise BadArgument("saving", self.saving, "a share of at most 1")

    @property
    def accuracy(self) -> tuple[float, float]:
        """Share right at full depth and at the point."""
        return float(self.full.values.mean()), float(self.adaptive.values.mean())

    @property
    def solved(self) -> bool:
        """Whether full depth beats the honest guess."""
        enough = self.accuracy[0] - self.guess >= AT_STAKE
        return enough and guessing_pvalue(self.full, self.guess) <= LEVEL

    @property
    def exercised(self) -> bool:
        """Whether the rule acts on the task."""
        return self.saving >= LEAST_SAVED

    @property
    def counts(self) -> bool:
        return not self.standing

    @cached_property
    def standing(self) -> str:
        """Why the task does not count, in a few words with the numbers; empty where it does."""
        full, _ = self.accuracy
        reasons = []
        if not self.solved:
            reasons.append(f"not solved: {100 * full:.1f} % right, {100 * self.guess:.1f} % by guessing")
        if not self.exercised:
            said = "saves" if self.saving >= 0 else "probing costs"
            reasons.append(f"not exercised: {said} {100 * abs(self.saving):.1f} %")
        return "; ".join(reasons)


def guessing_pvalue(right: ByItem, guess: float) -> float:
    """One-sided p-value of "``right`` [items] bool is no more often right than ``guess``".

    Exact binomial over distinct items; over clusters the same tail at the effective number of items.

    Raises:
        BadArgument: no item.
    """
    values = right.values
    if not len(values):
        raise BadArgument("right", "no item", "at least one item")
    if right.all_distinct:
        return float(stats.binomtest(int(values.sum()), len(values), guess, alternative="greater").pvalue)
    clusters, share = len(np.unique(right.cluster)), float(values.mean())
    if clusters == 1 or share == 0:
        return 1.0  # one cluster has no spread
    n = _effective(right, clusters)
    return float(special.betainc(share * n, n - share * n + 1, guess))


def _effective(right: ByItem, clusters: int) -> float:
    """How many independent items tell as much as these, which share clusters: n / deff.

    deff is the variance of the share over the C clusters beside that of independent items, times
    (t₁(C − 1) / t₁(n − 1))²; never below 1, nor above Σ m² / Σ m over clusters of m items, which is that of repeats.
    Where every item is alike no variance can be taken: then the latter.
    """
    values, share = right.values.astype(np.float64), float(right.values.mean())
    n, sizes = len(values), right.like(np.ones(len(values))).independent
    alone, repeats = share * (1 - share) / n, float(sizes @ sizes) / n
    if alone == 0:
        return n / repeats
    away = right.like(values - share).independent
    spread = clusters / (clusters - 1) * float(away @ away) / n**2
    few, many = stats.t.ppf(1 - LEVEL, [clusters - 1, n - 1])
    return n / min(repeats, max(1.0, float(spread / alone * (few / many) ** 2)))
