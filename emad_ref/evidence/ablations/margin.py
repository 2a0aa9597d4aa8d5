"""Margin m: the curve of quality against what is saved. (EMAD, "Ablations": accuracy vs speed)"""

from __future__ import annotations

import numpy as np

from emad_ref.evidence.ablations.rows import Row, Rows, require_quality
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.point import OperatingPoint
from emad_ref.sweep.grids import Spacing, emad_margins

COUNTS = {"smoke": 5, "standard": 9, "full": 33}  # margins from 0 up to where little is saved, by budget


def ablation(evidence: Evidence, rng: np.random.Generator) -> Exhibits:
    """Full depth, then the run's profile from margin 0 up, with the accuracy of every replayed task.

    Raises:
        Unsupported: as ``require_quality``.
    """
    require_quality(evidence.subject, evidence.bridging)
    rows = Rows(evidence, rng)
    shown = [rows.full({"margin, nats": None}) | accuracies(evidence, evidence.subject.full)]
    saved = Spacing(evidence.traces.validation, evidence.loaded.geometry)
    for point in emad_margins(evidence.traces.profile, saved, COUNTS[evidence.study.budget.name]):
        (row,) = rows.at([point], {"margin, nats": point.margin_nats})
        shown.append(row | accuracies(evidence, point))
    return Exhibits((Table(f"ablation, margin on {evidence.corpus}", shown),))


def accuracies(evidence: Evidence, point: OperatingPoint) -> Row:
    """Share right of each replayed task, and which of them count at the point; nothing where there are none."""
    tasks = {task: evidence.scored.at(task, point) for task in evidence.scored.replayed}
    counting = ", ".join(task for task, held in tasks.items() if held.counts) or "none"
    shares: Row = {f"{task} %": held.accuracy[1] for task, held in tasks.items()}
    return shares | ({"tasks that count": None if point == evidence.subject.full else counting} if tasks else {})
