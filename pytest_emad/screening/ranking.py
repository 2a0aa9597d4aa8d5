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
from emad_ref.signals import perplexity_rise_from_nats
from pytest_emad.screening.exit_families import OWN_HEAD, TUNED_LENS, candidate_probe_sets
from pytest_emad.screening.traces import TextTracesByReadout
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.fronts import LOSS_RESAMPLES, estimate_saving_at_loss
from pytest_emad.statistics.units import DocumentMembership
from pytest_emad.sweep.components import points_by_criterion, restrict_trace_gate_to_probes
from pytest_emad.sweep.front import LossTable, mark_lower_hull_corners
from pytest_emad.sweep.oracle_savings import (
    FREE_DEPTH,
    ORACLE_SETTINGS,
    RISE_LEVELS,
    WORTHLESS_SAVING,
    SavingsCurve,
    oracle_curve,
    savings_curve,
)


@dataclass(frozen=True, eq=False)
class TraceWithDocuments:
    """One split through one readout: ``trace``, and ``documents`` [sequences], the document of each sequence."""

    trace: Trace
    documents: DocumentMembership

    def flops_and_block_loss_tables(self, points: SavingsCurve) -> tuple[LossTable, LossTable]:
        """(by FLOPs, by blocks) losses and costs of a family of points, by document."""
        columns, sums = points.columns, self.documents.sum_by_document
        nll, tokens = sums(columns.nll_nats), sums(points.tokens)
        return LossTable(nll, sums(columns.flops), tokens), LossTable(nll, sums(columns.depth), tokens)


@dataclass(frozen=True, eq=False)
class ComparedFamily:
    """A criterion or an oracle, ``judged`` on evaluation text.

    ``chosen``: the same points on validation, None for an oracle.
    """

    name: str
    judged: SavingsCurve
    chosen: SavingsCurve | None = None

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
    chosen: TraceWithDocuments,
    judged: TraceWithDocuments,
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
    families = points_by_criterion(chosen.trace, probes, gate, schedule="monotone" if monotone else FREE_DEPTH)
    compared = [
        ComparedFamily(f"{name}{suffix}", *(savings_curve(name, read.trace, geometry, points, range(len(points)))
               for read in (judged, chosen)))
        for name, points in families.items()
    ]  # fmt: skip
    return build_compared_oracle_families(judged, geometry, monotone=monotone, probes=probes, called=called) + compared


def build_compared_oracle_families(
    judged: TraceWithDocuments,
    geometry: Geometry,
    *,
    monotone: bool = False,
    probes: Sequence[int] | None = None,
    called: str = "",
) -> list[ComparedFamily]:
    """Oracles: the ceiling of rules that know the divergence, and a threshold on it; raises as ``ceiling``."""
    compared = []
    for oracle in ("price", "threshold"):
        points = oracle_curve(judged.trace, geometry, oracle, monotone=monotone, probes=probes, count=ORACLE_SETTINGS)
        compared.append(ComparedFamily(points.name + (f", {called}" if called else ""), points))
    return compared


def rank_family_savings(
    families: Iterable[ComparedFamily],
    judged: TraceWithDocuments,
    chosen: TraceWithDocuments | None,
    rng: np.random.Generator,
    levels: Sequence[float] = RISE_LEVELS,
    resamples: int = LOSS_RESAMPLES,
) -> list[FamilySaving]:
    """A row per family and level, by level, then by net saving, largest first.

    ``chosen``: the split that fronts were chosen on; None if all families are oracles.
    """
    rows = []
    for family in families:
        mine = judged.flops_and_block_loss_tables(family.judged)
        theirs = (
            (None, None)
            if family.chosen is None or chosen is None
            else chosen.flops_and_block_loss_tables(family.chosen)
        )
        for level in levels:
            net, blocks = (
                estimate_saving_at_loss(
                    here, math.log1p(level), chosen=there, threshold=WORTHLESS_SAVING, rng=rng, resamples=resamples
                )
                for here, there in zip(mine, theirs, strict=True)
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


def saving_figure_rows(
    families: Iterable[ComparedFamily], judged: TraceWithDocuments, chosen: TraceWithDocuments | None = None
) -> list[dict[str, Any]]:
    """Rows of the figure "saving against loss": every corner of every front, measured on the judged text."""
    rows = []
    for family in families:
        (net, blocks), names = judged.flops_and_block_loss_tables(family.judged), family.judged.names
        sheet = net if family.chosen is None or chosen is None else chosen.flops_and_block_loss_tables(family.chosen)[0]
        savings, losses = sheet.savings_and_losses
        (corners,) = mark_lower_hull_corners(savings[None], losses[None])
        (saved, lost), (layers, _) = net.savings_and_losses, blocks.savings_and_losses
        rows += [
            {
                "family": family.name,
                "point": names[at],
                "net reduction %": float(saved[at]),
                "blocks %": float(layers[at]),
                "rise %": perplexity_rise_from_nats(float(lost[at] - lost[0])),
                "kind": "ceiling" if family.is_oracle else "criterion",
            }
            for at in np.flatnonzero(corners)
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
    before = TraceWithDocuments(through["chosen"], chosen.text.document_of_window)
    tuned = TraceWithDocuments(through["judged"], judged.text.document_of_window)
    own = TraceWithDocuments(judged.own, judged.text.document_of_window)
    families = [
        *build_compared_criterion_families(before, tuned, geometry, probes, gate, called=TUNED_LENS),
        *build_compared_oracle_families(tuned, geometry, monotone=True, probes=probes, called=TUNED_LENS),
        *build_compared_oracle_families(own, geometry, probes=probes, called=OWN_HEAD),
    ]
    rows = rank_family_savings(families, tuned, before, rng, resamples=FIGURE_RESAMPLES)
    return SavingsFigureAndTable(saving_figure_rows(families, tuned, before), saving_table_rows(rows))
