"""Time on this machine, predicted from what the parts of a decoding step were measured to cost
(``screening.prediction``).

Depths come from replay of evaluation text; a point that fills K and V in goes as deep as its exact twin, within what
that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.calibration.lens_files import FittedLens
from emad_ref.models.loading import LoadedModel
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.probes.lens import StateTranslators, attached_lens
from emad_ref.record import Ints
from emad_ref.screening.families import TUNED_LENS
from emad_ref.screening.prediction import SECONDS, ComponentCosts, measure_costs, seconds_per_token, shares_of
from emad_ref.screening.selection import SelectedPoint, SelectionRow, with_filled_kv
from emad_ref.screening.settings import ScreeningSettings
from emad_ref.screening.traces import SplitTraces
from emad_ref.sweep.oracles import FREE_DEPTH

APART = 0.25  # of a whole step, that its parts may be off by


@dataclass(frozen=True)
class CandidateTime:
    """``seconds`` a token at batch 1, and how many times as ``fast`` as full depth of the same decoder."""

    name: str
    seconds: float
    fast: float


@dataclass(frozen=True, eq=False)
class CandidateTimes:
    """``costs`` of the parts of a step on this machine, and what they predict, full depth first."""

    costs: ComponentCosts
    predicted: tuple[CandidateTime, ...]


def time_candidates(
    model: LoadedModel,
    fitted: FittedLens,
    states: StateTranslators | None,
    evaluated: SplitTraces,
    rows: Sequence[SelectionRow],
    judged: Sequence[SelectedPoint],
    settings: ScreeningSettings,
    progress: str | None = None,
) -> CandidateTimes:
    """Costs measured now, and the time of every point that reads by the lens or was decoded, at the rise allowed."""
    stepper = model.stepper
    attached = attached_lens(stepper, fitted.lens.digest)
    assert attached is not None
    translator = attached.translators[max(attached.translators)]
    above = None if states is None else states.pairs[max(states.pairs)]
    costs = measure_costs(
        stepper,
        lens=translator,
        translator=above,
        seconds=settings.part(SECONDS),
        seed=settings.seed,
        progress=progress,
    )
    full = full_seconds(costs)
    read = [row for row in rows if row.level == settings.rise and row.family.readout == TUNED_LENS]
    shown = [*judged, *(row for row in read if isinstance(row, SelectedPoint))]
    found = [CandidateTime("full depth", full, 1.0)]
    for row in shown:
        point = with_filled_kv(row.point, states) if row.point.schedule == FREE_DEPTH else row.point
        seconds = seconds_per_token(costs, point, shares_of(_replayed_depths(evaluated, row.point), stepper.layers))
        name = f"{row.family.name}, {row.family.depth} depth, {row.how}"
        found.append(CandidateTime(name, seconds, full / seconds))
    return CandidateTimes(costs, tuple(found))


def full_seconds(costs: ComponentCosts, keys: float | None = None) -> float:
    """Of a token at full depth, against ``keys`` keys; those that blocks were timed at by default."""
    deepest = shares_of(np.array([costs.layers]), costs.layers)
    return seconds_per_token(costs, full_depth(costs.layers), deepest, keys=keys)


def unsound(costs: ComponentCosts) -> str:
    """Why no time should be predicted from these costs; "" where their parts add up to a whole step."""
    full = full_seconds(costs)
    if costs.whole is not None and not 1 / (1 + APART) <= full / costs.whole <= 1 + APART:
        return (
            f"times do not add up: full depth is predicted at {1000 * full:.3g} ms a token and took "
            f"{1000 * costs.whole:.3g}; screen again on a quieter machine"
        )
    return ""


def _replayed_depths(evaluated: SplitTraces, point: OperatingPoint) -> Ints:
    exact = point
    if point.schedule in ("copying", "translated"):
        exact = replace(point, schedule=FREE_DEPTH, translators=None)
    return evaluated.replay(exact).depth
