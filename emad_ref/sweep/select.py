"""Choosing a point from a loss table (EMAD, "Select margin m on a small validation set"; METHODS likewise)."""

from __future__ import annotations

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
    """The row of lowest perplexity that saves at least ``net_reduction`` (a share of full-depth FLOPs), or None.

    For a table of single points, which save what they save: claims compare at exactly the same saving (``front``).
    """
    affordable = [row for row in table if row.net_reduction >= net_reduction]
    return min(affordable, key=lambda row: row.perplexity, default=None)
