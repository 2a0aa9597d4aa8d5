"""Simulated items answered twice, with a known difference in exit layer and score between the two sides.

Items differ in depth and difficulty, which both sides of a pair share; each side adds independent noise. Scores stay
within 0–1 without clipping, so that the mean difference is the requested one. Items form clusters, like questions about
one paragraph: with ``icc`` above 0, the cluster contributes that share of the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pytest_emad.claims.early_exit_answers import RuleComparison
from pytest_emad.measurements.early_exits import ExitScores
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import Leg, Verdict
from tests.claims.simulation import clustered

ITEMS = 120
LAYERS = 8
DEEP = 5.0  # mean exit block of the slower side
NOISE_BLOCKS, NOISE_SCORE = 0.5, 0.03  # standard deviations of either side's own noise
TOGETHER = 4  # items of a cluster where items are not independent


@dataclass(frozen=True)
class Cell:
    """``n`` clusters; ``icc``: the share of noise that the items of a cluster share; 0: items are distinct."""

    n: int = ITEMS
    icc: float = 0.0

    @property
    def each(self) -> int:
        """Number of items in a cluster."""
        return TOGETHER if self.icc else 1

    @property
    def items(self) -> int:
        return self.n * self.each

    @property
    def cluster(self) -> np.ndarray:
        """Cluster of each item, int64 [items]."""
        return np.repeat(np.arange(self.n), self.each)

    def noise(self, rng: np.random.Generator) -> np.ndarray:
        """Return standard normal noise [items], correlated by ``icc`` within a cluster."""
        return clustered(rng, self.n, self.each, self.icc)[0]

    def column(self, values: np.ndarray) -> ByItem:
        return ByItem(values, self.cluster)


PLAIN = Cell()


def scores(rng: np.random.Generator, gained: float, cell: Cell = PLAIN) -> tuple[ByItem, ByItem]:
    """Return (ours, theirs): ours is better by ``gained`` in expectation."""
    theirs = rng.uniform(0.3, 0.7, cell.items)
    return cell.column(theirs + gained + NOISE_SCORE * cell.noise(rng)), cell.column(theirs)


def contest(
    rng: np.random.Generator,
    where: str,
    *,
    sooner: float = 0.0,
    gained: float | None = 0.0,
    cell: Cell = PLAIN,
) -> RuleComparison:
    """Make ours exit ``sooner`` blocks earlier in expectation; ``gained``: None for the same score on every item."""
    tokens = rng.integers(2, 12, cell.items)
    blocks = DEEP + 0.5 * rng.standard_normal(cell.items)
    ours_blocks = blocks - sooner + NOISE_BLOCKS * cell.noise(rng)
    same = (cell.column(np.full(cell.items, 0.5)),) * 2
    ours, theirs = same if gained is None else scores(rng, gained, cell)
    return RuleComparison(where, exited(ours, ours_blocks, tokens), exited(theirs, blocks, tokens))


def alike(rng: np.random.Generator, where: str, cell: Cell = PLAIN, sizes: str = "") -> RuleComparison:
    """Compare a rule with itself."""
    one = contest(rng, where, cell=cell)
    return RuleComparison(where, one.ours, one.ours, sizes)


def exited(score: ByItem, blocks: np.ndarray, tokens: np.ndarray) -> ExitScores:
    """Make items whose tokens exit after ``blocks`` [items] on average."""
    return ExitScores(score, score.with_values(blocks * tokens), score.with_values(tokens))


def near(truths: dict[str, float], within: float) -> Callable[[Verdict], None]:
    """Check: the legs of these names exist and differ from the truth by at most ``within``."""

    def check(verdict: Verdict) -> None:
        legs = leg_by_name(verdict)
        for name, truth in truths.items():
            estimate = legs[name].estimate
            assert estimate is not None
            assert abs(estimate - truth) <= within, f"{name}: {estimate}, not {truth} ± {within}"

    return check


def leg_by_name(verdict: Verdict) -> dict[str, Leg]:
    return {leg.name: leg for leg in verdict.legs}
