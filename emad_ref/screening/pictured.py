"""Savings against losses of one model, as rows: criteria on its lens and the ceilings above them, to draw and to list.

Criteria share the lens, free depth and probes at every second layer that it translates; beside their ceilings stand
those of the model's own head, and of depth that only falls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.calibration.lens_file import FittedLens
from emad_ref.models.geometry import Geometry
from emad_ref.screening.families import LENS, OWN, probe_sets
from emad_ref.screening.ranking import Read, ceilings, figure_rows, ranked, rivals, table_rows
from emad_ref.screening.traced import Traced
from emad_ref.sweep.criteria import gate_at

RESAMPLES = 499


@dataclass(frozen=True)
class Pictured:
    """``figure``: rows of "saving against loss". ``table``: what each saves at exactly the same losses."""

    figure: Sequence[Mapping[str, Any]]
    table: Sequence[Mapping[str, Any]]


def pictured(
    chosen: Traced, judged: Traced, fitted: FittedLens, geometry: Geometry, rng: np.random.Generator
) -> Pictured:
    """Fronts are chosen on ``chosen`` and shown on ``judged``, ceilings both on ``judged``.

    Raises:
        BadArgument: traces that lack divergences, or readings of the lens' gate.
    """
    known = tuple(fitted.lens.translators)
    sets = probe_sets(fitted.lens.layers, known)
    probes, gate = sets[min(1, len(sets) - 1)], None
    through = {"chosen": chosen.tuned, "judged": judged.tuned}
    if fitted.gate is not None:
        for split, trace in through.items():
            through[split], gate = gate_at(trace, fitted.gate, known, probes)
    before = Read(through["chosen"], chosen.text.documents)
    tuned, own = Read(through["judged"], judged.text.documents), Read(judged.own, judged.text.documents)
    families = [
        *rivals(before, tuned, geometry, probes, gate, called=LENS),
        *ceilings(tuned, geometry, monotone=True, probes=probes, called=LENS),
        *ceilings(own, geometry, probes=probes, called=OWN),
    ]
    rows = ranked(families, tuned, before, rng, resamples=RESAMPLES)
    return Pictured(figure_rows(families, tuned, before), table_rows(rows))
