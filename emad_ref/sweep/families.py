"""The families that are compared at equal FLOPs, and the table that compares them.

A family is a sweep of one dial: EMAD's margin, a quantile, a depth, a threshold, a chunk length. All are decided by
replay of one trace; confidence rules need their columns in it. Of each family the best point at every net reduction is
chosen on one split and shown on another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace
from emad_ref.point import OperatingPoint
from emad_ref.signals import GAP
from emad_ref.sweep.grids import (
    by_quantile,
    chunked,
    emad_margins,
    fixed_entropies,
    positional,
    quantiles,
    responses,
    truncations,
)
from emad_ref.sweep.losses import Loss
from emad_ref.sweep.pareto import LEVELS
from emad_ref.sweep.select import chosen_by, equal_flops

EMAD = "EMAD, mean − margin"
SETTINGS = 33  # of each family's dial in a sweep, both ends included


def families(profile: Profile, calibration: Trace, count: int) -> dict[str, list[OperatingPoint]]:
    """Every sweep by its name in tables, ``count`` settings of each dial; the first is EMAD as published.

    ``profile`` knows entropy alone; thresholds of other signals come from ``calibration``, a trace of text of its kind.
    """
    layers, probes = profile.layers, profile.probes
    matched = {} if profile.statistics is None else {"EMAD, quantile": quantiles(profile, count)}
    return {
        EMAD: emad_margins(profile, count),
        **matched,
        "fixed truncation": truncations(layers),
        "fixed entropy": fixed_entropies(profile, count),
        "softmax response": responses(layers, probes, count),
        "chunked": chunked(profile, count),
        "positional": positional(layers),
        "top-2 gap, quantile": by_quantile(GAP, calibration, probes, count),
    }


def pareto_rows(
    validated: Mapping[str, Sequence[Loss]],
    evaluated: Callable[[OperatingPoint], Loss],
    levels: Sequence[float] = LEVELS,
) -> list[dict[str, Any]]:
    """Per net reduction and family, by its rise: the best point on validation, and what it does on evaluation.

    A family that never saves so much has no row at that level. Of a pruned rule perplexity and rise may be infinite,
    which stands as None; ``chosen by`` says what the point was chosen by (``select.equal_flops``). ``windows`` counts
    the text that the row, full depth included, was evaluated on.

    Args:
        validated: family → losses of all its points on the validation split.
        evaluated: the loss of a point on the evaluation split.
        levels: net reductions, shares of full-depth FLOPs.
    """
    rows = []
    for family, table in validated.items():
        for level in levels:
            best = equal_flops(table, level)
            if best is None:
                continue
            row = evaluated(best.point)
            finite = math.isfinite(row.perplexity)
            rows.append(
                {
                    "net reduction ≥ %": level,
                    "family": family,
                    "point": best.point.name,
                    "chosen by": chosen_by(table),
                    "windows": len(row.nll_nats),
                    "mean depth": row.mean_depth,
                    "net reduction %": row.net_reduction,
                    "perplexity": row.perplexity if finite else None,
                    "rise %": row.perplexity_rise if finite else None,
                    "accuracy %": row.accuracy,
                    "accuracy lost %": row.accuracy_lost,
                }
            )
    return ranked(rows)


def ranked(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``pareto_rows`` by net reduction, then by rise; those without one last, by the accuracy they lose.

    Perplexities of different text do not compare; rises over full depth on the same text do.
    """

    def rank(row: dict[str, Any]) -> tuple[float, float, float]:
        rise = row["rise %"]
        return row["net reduction ≥ %"], math.inf if rise is None else rise, row["accuracy lost %"]

    return sorted(rows, key=rank)
