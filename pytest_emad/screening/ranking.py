"""Ranking of criteria by their saving at equal loss, with oracles that know the divergence.

A criterion's front is chosen on validation text and crossed on evaluation text. An oracle uses evaluation text for both
and promises nothing. All executed work is charged as in ``sweep.oracle_savings``: K and V above an exit cost a copy,
which bounds the savings of copies. Criteria share readout, probes and schedule, and differ only in the signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.trace import Trace
from emad_ref.models.geometry import Geometry
from emad_ref.point import EntropyEstimator
from emad_ref.replay.losses import CostColumn, Losses
from pytest_emad.screening.exit_families import OWN_HEAD, TUNED_LENS, candidate_probe_sets
from pytest_emad.screening.traces import TextTracesByReadout
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.fronts import LOSS_RESAMPLES, estimate_saving_at_loss
from pytest_emad.sweep.components import points_by_criterion, restrict_trace_gate_to_probes
from pytest_emad.sweep.front import mark_front_corners
from pytest_emad.sweep.oracle_savings import (
    FREE_DEPTH,
    ORACLE_SETTINGS,
    RISE_LEVELS,
    WORTHLESS_SAVING,
    OracleName,
    oracle_losses,
    oracle_name,
    replay_losses_with_fill_cost,
)


@dataclass(frozen=True, eq=False)
class ComparedFamily:
    """A criterion or an oracle, ``judged`` on evaluation text.

    ``chosen``: the same points on validation, None for an oracle.
    """

    name: str
    judged: Losses
    chosen: Losses | None = None

    @property
    def is_oracle(self) -> bool:
        """Whether it is an oracle."""
        return self.chosen is None


@dataclass(frozen=True)
class FamilySaving:
    """Saving of a family at a loss of exactly ``level`` of perplexity: shares of FLOPs, net, and of blocks."""

    family: str
    level: float
    net: Estimate
    blocks: Estimate
    is_oracle: bool


def build_compared_criterion_families(
    chosen: Trace,
    judged: Trace,
    geometry: Geometry,
    probes: Sequence[int],
    gate: EntropyEstimator | None = None,
    *,
    monotone: bool = False,
    called: str = "",
) -> list[ComparedFamily]:
    """Every criterion at ``probes``, and both oracles, from traces through the same readout; ``called``: its name.

    Raises:
        BadArgument: as ``criteria`` and ``ceiling``.
    """
    suffix = f", {called}" if called else ""
    families = points_by_criterion(chosen, probes, gate, schedule="monotone" if monotone else FREE_DEPTH)
    compared = [
        ComparedFamily(
            f"{name}{suffix}", *(replay_losses_with_fill_cost(trace, geometry, points) for trace in (judged, chosen))
        )
        for name, points in families.items()
    ]
    return build_compared_oracle_families(judged, geometry, monotone=monotone, probes=probes, called=called) + compared


def build_compared_oracle_families(
    judged: Trace,
    geometry: Geometry,
    *,
    monotone: bool = False,
    probes: Sequence[int] | None = None,
    called: str = "",
) -> list[ComparedFamily]:
    """Oracles: the ceiling of rules that know the divergence, and a threshold on it; raises as ``ceiling``."""
    compared = []
    oracles: tuple[OracleName, ...] = ("price", "threshold")
    for oracle in oracles:
        losses = oracle_losses(judged, geometry, oracle, monotone=monotone, probes=probes, count=ORACLE_SETTINGS)
        compared.append(ComparedFamily(oracle_name(oracle, monotone) + (f", {called}" if called else ""), losses))
    return compared


def rank_family_savings(
    families: Iterable[ComparedFamily],
    rng: np.random.Generator,
    levels: Sequence[float] = RISE_LEVELS,
    resamples: int = LOSS_RESAMPLES,
) -> list[FamilySaving]:
    """A row per family and level, by level, then by net saving, largest first."""
    costs: tuple[CostColumn, CostColumn] = ("flops", "depth")
    rows = []
    for family in families:
        for level in levels:
            net, blocks = (
                estimate_saving_at_loss(
                    family.judged,
                    math.log1p(level),
                    chosen=family.chosen,
                    cost=cost,
                    threshold=WORTHLESS_SAVING,
                    rng=rng,
                    resamples=resamples,
                )
                for cost in costs
            )
            rows.append(FamilySaving(family.name, level, net, blocks, family.is_oracle))
    return sorted(rows, key=lambda row: (row.level, -row.net.value))


def saving_table_rows(rows: Iterable[FamilySaving]) -> list[dict[str, Any]]:
    """Plain rows of a table; shares are fractions."""
    return [
        {
            "rise %": row.level,
            "family": row.family,
            "net reduction %": row.net.value,
            "net low %": row.net.low,
            "net high %": row.net.high,
            "blocks %": row.blocks.value,
            "blocks low %": row.blocks.low,
            "blocks high %": row.blocks.high,
            "n": row.net.n,
        }
        for row in rows
    ]


def saving_figure_rows(families: Iterable[ComparedFamily]) -> list[dict[str, Any]]:
    """Rows of the figure "saving against loss": every corner of every front, measured on the judged text."""
    rows = []
    for family in families:
        judged = family.judged
        blocks = judged.saved_shares("depth")
        rows += [
            {
                "family": family.name,
                "point": judged.points[at].name,
                "net reduction %": float(judged.savings[at]),
                "blocks %": float(blocks[at]),
                "rise %": float(judged.rises[at]),
                "kind": "ceiling" if family.is_oracle else "criterion",
            }
            for at in np.flatnonzero(mark_front_corners(judged if family.chosen is None else family.chosen))
        ]
    return rows


FIGURE_RESAMPLES = 499


@dataclass(frozen=True)
class SavingsFigureAndTable:
    """``figure``: rows of "saving against loss". ``table``: savings of each at equal losses."""

    figure: Sequence[Mapping[str, Any]]
    table: Sequence[Mapping[str, Any]]


def compute_savings_figure_and_table(
    chosen: TextTracesByReadout,
    judged: TextTracesByReadout,
    fitted: FittedLens,
    geometry: Geometry,
    rng: np.random.Generator,
) -> SavingsFigureAndTable:
    """Figure and table: fronts are chosen on ``chosen`` and shown on ``judged``, oracles both on ``judged``.

    Raises:
        BadArgument: traces that lack divergences, or readings of the lens' gate.
    """
    lens_layers = tuple(fitted.lens.translators)
    sets = candidate_probe_sets(fitted.lens.layers, lens_layers)
    probes, gate = sets[min(1, len(sets) - 1)], None
    through = {"chosen": chosen.tuned, "judged": judged.tuned}
    if fitted.gate is not None:
        for split, trace in through.items():
            through[split], gate = restrict_trace_gate_to_probes(trace, fitted.gate, lens_layers, probes)
    before, tuned = through["chosen"], through["judged"]
    families = [
        *build_compared_criterion_families(before, tuned, geometry, probes, gate, called=TUNED_LENS),
        *build_compared_oracle_families(tuned, geometry, monotone=True, probes=probes, called=TUNED_LENS),
        *build_compared_oracle_families(judged.own, geometry, probes=probes, called=OWN_HEAD),
    ]
    rows = rank_family_savings(families, rng, resamples=FIGURE_RESAMPLES)
    return SavingsFigureAndTable(saving_figure_rows(families), saving_table_rows(rows))
