"""EMAD beside its rivals: whole sweeps by replay, chosen on the validation split, compared on the evaluation split."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from emad_ref.point import OperatingPoint
from emad_ref.sweep.grids import chunked, emad_margins, fixed_entropies, positional, quantiles, responses, truncations
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.sweep.pareto import LEVELS, Duel, duels
from emad_ref.sweep.select import equal_flops
from emad_ref.verdict.interval import Estimate, perplexity_rise
from pytest_emad.options import MARGINS

if TYPE_CHECKING:
    import numpy as np

    from pytest_emad.session import Evidence

EMAD = "EMAD, mean − margin"


class Rivals:
    """Sweeps of one model's evidence, taken when first asked for and kept."""

    def __init__(self, evidence: Evidence):
        self._evidence = evidence

    @cached_property
    def families(self) -> dict[str, list[OperatingPoint]]:
        """Every sweep by its name in tables; the first is EMAD as published."""
        profile = self._evidence.profile
        layers, probes = profile.layers, profile.probes
        by_quantile = {} if profile.statistics is None else {"EMAD, quantile": quantiles(profile, MARGINS)}
        return {
            EMAD: emad_margins(profile, MARGINS),
            **by_quantile,
            "fixed truncation": truncations(layers),
            "fixed entropy": fixed_entropies(profile, MARGINS),
            "softmax response": responses(layers, probes, MARGINS),
            "chunked": chunked(profile, MARGINS),
            "positional": positional(layers),
        }

    @cached_property
    def validated(self) -> dict[str, list[Loss]]:
        """Validation losses of every family."""
        geometry = self._evidence.loaded.geometry
        return {
            family: loss_table(self._evidence.validation, geometry, points) for family, points in self.families.items()
        }

    @cached_property
    def _evaluated(self) -> dict[OperatingPoint, Loss]:
        return {}

    def evaluated(self, point: OperatingPoint) -> Loss:
        """The evaluation loss of one point."""
        if point not in self._evaluated:
            (row,) = loss_table(self._evidence.evaluation, self._evidence.loaded.geometry, [point])
            self._evaluated[point] = row
        return self._evaluated[point]

    def duels(self, rival: str) -> list[Duel]:
        """EMAD against a family, at every net reduction both reach on the validation split."""
        return duels(self.validated[EMAD], self.validated[rival])

    def compared(self, duel: Duel, rng: np.random.Generator) -> Estimate:
        """Relative rise of perplexity of EMAD over the rival on the evaluation split, paired by document."""
        mine, theirs = (self.evaluated(point) for point in (duel.ours, duel.rival))
        evidence = self._evidence
        return perplexity_rise(
            evidence.by_document(mine.nll_nats),
            evidence.by_document(theirs.nll_nats),
            evidence.by_document(evidence.evaluation.lengths),
            threshold=0.0,
            rng=rng,
        )

    def table(self, levels: Sequence[float] = LEVELS) -> list[dict[str, Any]]:
        """Per family and net reduction: the best point on validation, and what it does on the evaluation split."""
        rows = []
        for family, table in self.validated.items():
            for level in levels:
                best = equal_flops(table, level)
                if best is None:
                    continue
                row = self.evaluated(best.point)
                rows.append(
                    {
                        "net reduction ≥ %": level,
                        "family": family,
                        "point": best.point.name,
                        "mean depth": row.mean_depth,
                        "net reduction %": row.net_reduction,
                        "perplexity": row.perplexity,
                        "rise %": row.perplexity_rise,
                    }
                )
        return sorted(rows, key=lambda row: (row["net reduction ≥ %"], row["perplexity"]))
