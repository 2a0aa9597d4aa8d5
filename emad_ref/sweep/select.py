"""Choosing a point from a loss table (EMAD, "Select margin m on a small validation set"; METHODS likewise)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from emad_ref.point import OperatingPoint
from emad_ref.sweep.losses import Loss

PERPLEXITY_POINTS = 0.1  # the paper's bound
PERPLEXITY_RELATIVE = 0.01  # ours beside it: at perplexity 1.4 the paper's 0.1 alone would be 7 %
ACCURACY = 0.005  # the paper's bound on EM


def within_bounds(row: Loss, reference_perplexity: float) -> bool:
    """Validation drop ≤ min(0.1 perplexity points, 1 % relative)."""
    drop = row.perplexity - reference_perplexity
    return drop <= PERPLEXITY_POINTS and row.perplexity_rise <= PERPLEXITY_RELATIVE


def cheapest_within_bounds(
    table: Sequence[Loss],
    reference_perplexity: float,
    accuracy_drops: Callable[[OperatingPoint], Mapping[str, float]] | None = None,
) -> Loss | None:
    """The row of smallest mean depth whose validation drop is within bounds; None when there is none.

    Args:
        accuracy_drops: point → validation accuracy lost by each task that counts there, fractions, each bound by
            0.5 %: a mean would let one task pay for another. Asked only about points within the bounds of perplexity,
            cheapest first. None: perplexity alone decides.
    """
    for row in sorted(table, key=lambda row: row.mean_depth):
        if not within_bounds(row, reference_perplexity):
            continue
        drops = {} if accuracy_drops is None else accuracy_drops(row.point)
        if all(drop <= ACCURACY for drop in drops.values()):
            return row
    return None


def equal_flops(table: Sequence[Loss], net_reduction: float) -> Loss | None:
    """The best-quality row that saves at least ``net_reduction`` (a share of full-depth FLOPs).

    For a comparison at equal FLOPs the rival is given the benefit: the row of lowest perplexity among those whose net
    reduction is at least ``net_reduction``; where none saves that much, None. ``chosen_by`` says when it is the most
    accurate row instead.
    """
    affordable = [row for row in table if row.net_reduction >= net_reduction]
    return min(affordable, key=QUALITY[chosen_by(table)], default=None)


QUALITY: dict[str, Callable[[Loss], float]] = {
    "perplexity": lambda row: row.perplexity,
    "accuracy": lambda row: -row.accuracy,
}


def chosen_by(table: Sequence[Loss]) -> str:
    """What rows of one family are compared by: ``perplexity``, or ``accuracy`` where that of any row is infinite.

    A pruned rule loses next tokens at most thresholds. Where it happens to lose none, as where every token leaves
    before anything is pruned, its perplexity is finite and says nothing of the others.
    """
    return "perplexity" if all(math.isfinite(row.perplexity) for row in table) else "accuracy"
