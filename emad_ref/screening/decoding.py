"""Lossy exits as they are decoded: K and V above an exit filled in from its state, token by token, on text of its own.

Replay knows what a threshold loses with exact K and V; filled-in ones, by low-rank translators of the exit's state,
lose more. So the rule that saved most on the text to choose on is decoded at a few thresholds on other text, from
strict to loose in an order fixed before, and

    the bound   the loosest whose rise evaluation will confirm (``screening.choosing``)
    the promise the loosest that Learn-then-Test certifies (``screening.guarantee``), where any is

are found there; what is recommended is decoded once more, on evaluation text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.translating import RANK, fit_translators
from emad_ref.models.loading import Loaded
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.readout.states import StateTranslators, attach_translators
from emad_ref.record import Floats
from emad_ref.screening.bounded import EXCESS, excess
from emad_ref.screening.choosing import Losses
from emad_ref.screening.families import Family
from emad_ref.screening.fitting import unseen
from emad_ref.screening.guarantee import Guarantee, guaranteed, require_order
from emad_ref.screening.reached import Chooser
from emad_ref.screening.settings import Settings
from emad_ref.screening.signs import Signs
from emad_ref.screening.texts import ENOUGH, Text
from emad_ref.screening.watching import read_signs
from emad_ref.sweep import losses
from emad_ref.sweep.decoded import decoded_columns
from emad_ref.sweep.losses import Columns
from emad_ref.verdict.units import ByDocument

# what a threshold may be bound to lose with exact K and V, as shares of the rise that is allowed: strict to loose
STRICTNESS = (0.3, 0.5, 0.65, 0.8, 0.95)
ROWS = 64


@dataclass(frozen=True, eq=False)
class Certified:
    """``tried``: points decoded from strict to loose, with ``bounds`` [points], the least level that each will be
    confirmed at, and ``saved`` [points] net, all on the text to certify on.

    ``chosen``: the loosest within the rise that is allowed; None: none is. ``promise``: of Learn-then-Test, and
    ``signs`` of the documents that it was made on, at most ``ENOUGH`` windows; None where nothing is promised.
    """

    family: Family
    tried: tuple[OperatingPoint, ...]
    bounds: Floats
    saved: Floats
    chosen: OperatingPoint | None
    promise: Guarantee
    signs: Signs | None

    @property
    def promised(self) -> OperatingPoint | None:
        """The point that ``promise`` is about."""
        return next((point for point in self.tried if point.name == self.promise.chosen), None)


def fitted_states(
    model: Loaded, best: OperatingPoint, text: Text, settings: Settings, progress: str | None = None
) -> StateTranslators | None:
    """Translators of states above the exits of ``best``, attached; None where every exit is right below the last layer.

    Fitted on what the lens did not see of ``text``.
    """
    exits = [probe for probe in best.probes if probe <= best.layers - 2]
    if not exits:
        return None
    rank, windows = min(RANK, model.geometry.hidden), unseen(model, text, settings)
    found = fit_translators(model.stepper, model.fingerprint, windows, exits, rank, progress=progress)
    attach_translators(model.stepper, found, model.fingerprint)
    return found


def grid(
    family: Family, best: OperatingPoint, chooser: Chooser, rise: float, states: StateTranslators | None
) -> list[OperatingPoint]:
    """Thresholds of the dial that ``best`` is a point of, strict to loose, as they are decoded.

    K and V above an exit are those of its state, translated by ``states``; None: as it is.
    """
    dial = next(each for each in family.dials if each.point(each.most).probes == best.probes)
    points = [chooser.loosest(dial, share * rise) for share in STRICTNESS]
    found = {point.name: filled(point, states) for point in points if point is not None}
    return list(found.values())  # two settings of one name are one to whoever reads it


def filled(point: OperatingPoint, states: StateTranslators | None) -> OperatingPoint:
    """``point`` with K and V above an exit translated by ``states``; None: copied."""
    if states is None:
        return replace(point, schedule="copying")
    return replace(point, schedule="translated", translators=states.digest)


def decoded(model: Loaded, text: Text, points: Sequence[OperatingPoint], progress: str | None = None) -> Columns:
    """Columns of ``points`` on ``text``."""
    return decoded_columns(model.stepper, model.geometry, text.windows, points, rows=ROWS, progress=progress)


def certified(
    model: Loaded,
    text: Text,
    family: Family,
    points: Sequence[OperatingPoint],
    settings: Settings,
    judged: int,
    progress: str | None = None,
) -> Certified:
    """Decode ``points``, from strict to loose, on ``text``, and choose. ``judged``: documents of evaluation.

    Raises:
        BadArgument: no points.
    """
    require_order(points)
    whole = take_trace(model.stepper, text.windows, progress=None if progress is None else f"{progress}, full depth")
    full = losses.columns(whole, model.geometry, [full_depth(whole.layers)])
    columns = beside(full, decoded(model, text, points, progress))
    tokens = text.lengths
    known = Losses(columns.nll_nats[:, 0], tokens, text.documents, judged)
    bounds = np.array([known.bound(columns.nll_nats[:, 1 + number]) for number in range(len(points))])
    within = [number for number in range(len(points)) if bounds[number] <= settings.rise]
    by = partial(ByDocument.summed, document=text.documents)
    promise = guaranteed(
        excess(by(columns.nll_nats[:, 1:]), by(columns.nll_nats[:, 0]), by(tokens)),
        [point.name for point in points],
        EXCESS,
        text=settings.corpus,
        risk=float(np.log1p(settings.rise)),
        seed=settings.seed,
    )
    saved = 1 - columns.flops[:, 1:].sum(axis=0) / columns.flops[:, 0].sum()
    chosen = points[max(within)] if within else None
    found = Certified(family, tuple(points), bounds, saved, chosen, promise, None)
    if found.promised is None:
        return found
    seen = text.first(ENOUGH).windows
    named = None if progress is None else f"{progress}, signs"
    return replace(found, signs=read_signs(model.stepper, found.promised, seen, settings.corpus, progress=named))


def beside(left: Columns, right: Columns) -> Columns:
    """The points of both, ``left`` first, on the sequences of ``right``: the first of those of ``left``."""
    count = len(right.nll_nats)
    names = [each.name for each in fields(Columns)]
    return Columns(*(np.hstack([getattr(left, name)[:count], getattr(right, name)]) for name in names))
