"""Items answered twice, of which it is known how much earlier, and how much better, one side answers them.

Items differ in how deep they go and how well they are answered; both sides of a pair share that, and each adds noise of
its own. Scores stay within 0–1 without being clipped, so that the mean difference is the one asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.evidence.exits.answers import Exited
from emad_ref.questions.early_exits import Contest
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.units import ByItem

ITEMS = 120
LAYERS = 8
DEEP = 5.0  # mean exit block of the slower side
NOISE_BLOCKS, NOISE_SCORE = 0.5, 0.03  # standard deviations of either side's own noise


def scores(rng: np.random.Generator, gained: float, items: int = ITEMS) -> tuple[ByItem, ByItem]:
    """(ours, theirs): ours is ``gained`` better in expectation."""
    theirs = rng.uniform(0.3, 0.7, items)
    return ByItem.distinct(theirs + gained + NOISE_SCORE * rng.standard_normal(items)), ByItem.distinct(theirs)


def contest(
    rng: np.random.Generator,
    where: str,
    *,
    sooner: float = 0.0,
    gained: float | None = 0.0,
    items: int = ITEMS,
) -> Contest:
    """Ours leaves ``sooner`` blocks earlier in expectation; ``gained``: None for the same score on every item."""
    tokens = rng.integers(2, 12, items)
    blocks = DEEP + 0.5 * rng.standard_normal(items)
    ours_blocks = blocks - sooner + NOISE_BLOCKS * rng.standard_normal(items)
    ours, theirs = (ByItem.distinct(np.full(items, 0.5)),) * 2 if gained is None else scores(rng, gained, items)
    return Contest(where, exited(ours, ours_blocks, tokens), exited(theirs, blocks, tokens))


def exited(score: ByItem, blocks: np.ndarray, tokens: np.ndarray) -> Exited:
    """Items whose tokens leave after ``blocks`` [items] on average."""
    return Exited(score, ByItem.distinct(blocks * tokens), ByItem.distinct(tokens))


def near(truths: dict[str, float], within: float) -> Callable[[Verdict], None]:
    """A check: the legs of these names are there and lie within ``within`` of the truth."""

    def check(verdict: Verdict) -> None:
        legs = leg_by_name(verdict)
        for name, truth in truths.items():
            estimate = legs[name].estimate
            assert estimate is not None
            assert abs(estimate - truth) <= within, f"{name}: {estimate}, not {truth} ± {within}"

    return check


def leg_by_name(verdict: Verdict) -> dict[str, Leg]:
    return {leg.name: leg for leg in verdict.legs}
