"""Selection of an exit: the point of each family that saves most within a level of loss, and the best one decoded.

A threshold is chosen by an upper confidence bound on its rise of perplexity. With a rise of m ± s nats per token on the
selection text and an expected ±s′ on the judged text, the judged text's bound is below the level in 95 of 100 runs if

    m + t·√(s² + s′²) + t·s′ ≤ log(1 + level)

Standard errors are over documents (the linearised error of a ratio); t is at 5 %, one-sided (``losses.bound_rises``).
The result lists the headroom of oracles with the savings of families. Free depth is replayed with exact K and V. The
best free rule is then decoded with filled-in K and V at a few thresholds, from strict to loose, and certified
(``screening.guarantee``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from emad_ref.absent import Absent
from emad_ref.calibration.linear_maps import TRANSLATOR_RANK, fit_translators
from emad_ref.calibration.trace import take_trace
from emad_ref.decoding.teacher_forcing import TeacherForcedText
from emad_ref.errors import BadArgument
from emad_ref.models.geometry import Geometry
from emad_ref.models.loading import LoadedModel
from emad_ref.point import EXACT_FREE, OperatingPoint, full_depth
from emad_ref.probes.tuned_lens import StateTranslators, attach_translators
from emad_ref.record import Floats
from emad_ref.replay import losses
from emad_ref.replay.grids import ThresholdSweep
from emad_ref.replay.losses import CostColumn, Losses, PointLoss, bound_rises, decode_losses, losses_of_replays
from emad_ref.replay.replay import ReplayResult, compute_decode_flops_by_sequence
from pytest_emad.screening.drift import DocumentFeatures, features_of_teacher_forced_texts
from pytest_emad.screening.exit_families import OWN_HEAD, TUNED_LENS, ExitFamily
from pytest_emad.screening.guarantee import (
    ERROR,
    EXCESS,
    Guarantee,
    certify_losses,
    excess_loss,
    require_strict_to_loose,
    risk_p_values,
)
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.traces import ENOUGH_DOCUMENTS, ScreeningText, TextTracesByReadout, iterate_unseen_windows
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.rates import RESAMPLES, draw_document_counts, estimate_point_rise, estimate_saving
from pytest_emad.statistics.units import ByDocument
from pytest_emad.sweep.oracle_savings import OracleName, oracle_losses, sequence_flops_with_fill_cost

SEARCH_STEPS = 16  # steps of a search between settings, each halving the rest of seven orders of magnitude
FINEST_SETTING = 1e-7  # the smallest tried setting, as share of the largest


def loosest_point(
    dial: ThresholdSweep, level: float, bound: Callable[[OperatingPoint], float]
) -> OperatingPoint | None:
    """The loosest point of ``dial`` with a ``bound`` of at most ``level``; None if no point stays within.

    Larger settings are looser, and bounds are assumed to rise with them. If they do not, the search may miss a looser
    point; the bound of the returned one holds all the same.
    """
    if bound(dial.point(dial.most)) <= level:
        return _named_point(dial, dial.most)
    low, high = max(dial.least, FINEST_SETTING * dial.most), dial.most
    if bound(dial.point(low)) > level:
        return None
    for _ in range(SEARCH_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if bound(dial.point(middle)) <= level else (low, middle)
    return _named_point(dial, low)


def _named_point(dial: ThresholdSweep, setting: float) -> OperatingPoint:
    return dial.make_points([setting])[0]


@dataclass(frozen=True, eq=False)
class SelectedPoint:
    """The ``point`` of one family that saves most within one level of loss.

    ``net``: share of full depth's FLOPs, ``rise`` of perplexity, ``blocks``: share of blocks; with intervals by
    document on evaluation text. ``how``: ``replayed`` (exact K and V, free depth charged for copies) or ``decoded``.
    """

    family: ExitFamily
    level: float
    point: OperatingPoint
    net: Estimate
    rise: Estimate
    blocks: Estimate
    how: str = "replayed"


@dataclass(frozen=True, eq=False)
class FamilyWithoutPoint:
    """A family without any saving point within one level."""

    family: ExitFamily
    level: float


SelectionRow = SelectedPoint | FamilyWithoutPoint


class PointSelector:
    """Chooses points on ``validate``, by their upper bounds, for confirmation on ``n_judged_documents`` of other text.

    ``optimistic``: by their lower bounds.
    """

    def __init__(
        self, validate: TextTracesByReadout, n_judged_documents: int, geometry: Geometry, *, optimistic: bool = False
    ):
        self._traced, self._geometry = validate, geometry
        self._confirmed_on, self._optimistic = n_judged_documents, optimistic

    @cached_property
    def _full(self) -> Losses:
        return self.losses([])

    def losses(self, points: Sequence[OperatingPoint]) -> Losses:
        """Full depth, and then ``points``, on the selection text."""
        return replay_losses_on_split(self._traced, points, self._geometry)

    def rise_bound(self, point: OperatingPoint) -> float:
        """Level of rise of ``point`` by the selector's bound (``losses.bound_rises``)."""
        nats = self._traced.own.token_positions.sum_by_sequence(self._traced.replay(point).nll_nats)
        excess = self._traced.text.document_of_window.sum_by_document(nats) - self._full.nats[0]
        bound = bound_rises(excess, self._full.tokens, confirmed_on=self._confirmed_on, lower=self._optimistic)
        return float(bound)

    def net_saving(self, point: OperatingPoint) -> float:
        """Net share of full depth's FLOPs."""
        spent = charged_flops_by_window(self._traced, self._traced.replay(point), self._geometry).sum()
        return float(1 - spent / self._full.totals("flops")[0])

    def best_point(self, family: ExitFamily, level: float) -> OperatingPoint | None:
        """The point that saves most within ``level``, of all sets of probes or all points; None without one."""
        within = [point for dial in family.dials if (point := self.loosest_point(dial, level)) is not None]
        within += [point for point in family.points if self.rise_bound(point) <= level]
        losses = self.losses(within)
        best = losses.choose("flops", losses.savings > 0)
        return None if isinstance(best, Absent) else best.point

    def loosest_point(self, dial: ThresholdSweep, level: float) -> OperatingPoint | None:
        """The loosest point of ``dial`` within ``level``; None without one."""
        return loosest_point(dial, level, self.rise_bound)


def charged_flops_by_window(traced: TextTracesByReadout, replayed: ReplayResult, geometry: Geometry) -> Floats:
    """[windows] FLOPs of decoding; free depth is charged for copying K and V above exits."""
    trace = traced.trace_for_point(replayed.point)
    free = replayed.point.schedule in EXACT_FREE
    return (
        sequence_flops_with_fill_cost(trace, replayed, geometry)
        if free
        else compute_decode_flops_by_sequence(trace, replayed, geometry)
    )


def replay_losses_on_split(traced: TextTracesByReadout, points: Sequence[OperatingPoint], geometry: Geometry) -> Losses:
    """A row per point, full depth first; charged as in ``charged_flops_by_window``."""
    replays = (traced.replay(point) for point in (full_depth(traced.own.layers), *points))
    return losses_of_replays(traced.own, replays, lambda replayed: charged_flops_by_window(traced, replayed, geometry))


class EvaluationIntervals:
    """Intervals by document of losses on evaluation text, all from the same samples of documents."""

    def __init__(self, text: ScreeningText, seed: int):
        self._rng = np.random.default_rng(seed)
        self._draws = draw_document_counts(text.n_documents, RESAMPLES, self._rng)

    def estimate_point(self, family: ExitFamily, level: float, loss: PointLoss, how: str = "replayed") -> SelectedPoint:
        """The rise and the savings of ``loss`` over its table's first row, full depth."""
        # a guarantee, if there is one, covers documents that this text lacks; else nothing does
        rise = estimate_point_rise(loss, threshold=level, rng=self._rng, draws=self._draws, worst=None)
        net, blocks = (self.estimate_saving(loss, cost) for cost in COSTS)
        return SelectedPoint(family, level, loss.point, net, rise, blocks, how)

    def estimate_saving(self, loss: PointLoss, cost: CostColumn) -> Estimate:
        """Share of full depth's ``cost`` that the point saves."""
        return estimate_saving(loss, threshold=0.0, rng=self._rng, cost=cost, draws=self._draws, unit="share")


COSTS: tuple[CostColumn, CostColumn] = ("flops", "depth")


def select_points(
    families: Iterable[ExitFamily],
    levels: Sequence[float],
    selector: PointSelector,
    traced: TextTracesByReadout,
    geometry: Geometry,
    seed: int = 0,
) -> list[SelectionRow]:
    """A row per family and level, judged on ``traced``. ``seed``: of the resampling."""
    chosen = [(family, level, selector.best_point(family, level)) for family in families for level in levels]
    return _with_intervals(chosen, traced, geometry, seed)


def optimistic_savings(
    families: Iterable[ExitFamily], level: float, traced: TextTracesByReadout, geometry: Geometry, seed: int = 0
) -> list[SelectionRow]:
    """Optimistic bound: the largest saving of each family at ``level`` with any number of documents.

    Its point, chosen on ``traced``, is the loosest that these documents do not show to exceed the level. More documents
    can only exclude it. The bound is not a point for decoding.
    """
    dearest = PointSelector(traced, traced.text.n_documents, geometry, optimistic=True)
    return _with_intervals(
        [(family, level, dearest.best_point(family, level)) for family in families], traced, geometry, seed
    )


def _with_intervals(
    chosen: Sequence[tuple[ExitFamily, float, OperatingPoint | None]],
    traced: TextTracesByReadout,
    geometry: Geometry,
    seed: int,
) -> list[SelectionRow]:
    judge = EvaluationIntervals(traced.text, seed)
    points = list(dict.fromkeys(point for _, _, point in chosen if point is not None))
    losses = replay_losses_on_split(traced, points, geometry)
    return [
        FamilyWithoutPoint(family, level)
        if point is None
        else judge.estimate_point(family, level, losses[1 + points.index(point)])
        for family, level, point in chosen
    ]


ORACLE_SETTINGS = 64  # settings of each oracle
ORACLES: tuple[OracleName, ...] = ("threshold", "price")


@dataclass(frozen=True)
class OracleHeadroom:
    """The oracle's point that saves most blocks within ``level``: that share of blocks, and its net share of FLOPs.

    ``low``, ``high``: 95 % interval of ``net``.
    """

    oracle: str
    readout: str
    depth: str
    level: float
    blocks: float
    net: float
    low: float
    high: float


def compute_oracle_headrooms(
    traced: TextTracesByReadout, geometry: Geometry, levels: Sequence[float], seed: int = 0
) -> list[OracleHeadroom]:
    """Headroom of every oracle by either readout at free and monotone depth, a row per level.

    ``seed``: of resampling.
    """
    headroom, judge = [], EvaluationIntervals(traced.text, seed)
    for oracle in ORACLES:
        for readout, trace in ((OWN_HEAD, traced.own), (TUNED_LENS, traced.tuned)):
            for depth in ("free", "monotone"):
                losses = oracle_losses(trace, geometry, oracle, monotone=depth == "monotone", count=ORACLE_SETTINGS)
                for level in levels:
                    best = losses.choose("depth", losses.rises <= level)
                    assert not isinstance(best, Absent), "full depth is within every level"
                    net, blocks = judge.estimate_saving(best, "flops"), float(losses.saved_shares("depth")[best.index])
                    headroom.append(OracleHeadroom(oracle, readout, depth, level, blocks, net.value, net.low, net.high))
    return headroom


def largest_headroom(headroom: Sequence[OracleHeadroom], level: float) -> OracleHeadroom:
    """The oracle with the largest net saving at ``level``; a saving of blocks may cost as much as it saves."""
    return max((each for each in headroom if each.level == level), key=lambda each: each.net)


# bounds on a threshold's loss with exact K and V, as shares of the allowed rise: strict to loose
STRICTNESS = (0.3, 0.5, 0.65, 0.8, 0.95)
ROWS = 64


@dataclass(frozen=True, eq=False)
class Certification:
    """Certification of decoded points.

    ``tried``: points from strict to loose, up to the first that is neither within the allowed rise nor certified, with
    ``bounds`` [points], the smallest level at which each will be confirmed, and ``saved`` [points] net, all on the
    certification text.

    ``point_within_bound``: the loosest within the allowed rise, certified or not; None without one.
    ``promise``: the guarantee of Learn-then-Test, and ``signs``, features of its documents, at most
    ``ENOUGH_DOCUMENTS`` windows; None without a promise.
    """

    family: ExitFamily
    tried: tuple[OperatingPoint, ...]
    bounds: Floats
    saved: Floats
    point_within_bound: OperatingPoint | None
    promise: Guarantee
    signs: DocumentFeatures | None

    @property
    def certified_point(self) -> OperatingPoint | None:
        """The point that ``promise`` certifies; None without one."""
        return None if self.promise.passed is None else self.tried[self.promise.passed]


def fit_state_translators(
    model: LoadedModel,
    best: OperatingPoint,
    text: ScreeningText,
    settings: ScreeningSettings,
    progress: str | None = None,
) -> StateTranslators | None:
    """Fit translators of states above the exits of ``best``, attached to the model.

    None if every exit is right below the last layer. The lens was not fitted on this part of ``text``.
    """
    exits = [probe for probe in best.probes if probe <= best.layers - 2]
    if not exits:
        return None
    rank, windows = min(TRANSLATOR_RANK, model.geometry.hidden), iterate_unseen_windows(model, text, settings)
    states = fit_translators(model.stepper, model.fingerprint, windows, exits, rank, progress=progress)
    attach_translators(model.stepper, states, model.fingerprint)
    return states


def candidate_points_up_to_best(
    family: ExitFamily, best: OperatingPoint, selector: PointSelector, rise: float, states: StateTranslators | None
) -> list[OperatingPoint]:
    """Points at or below the thresholds of ``best`` in its family, strict to loose, for decoding.

    ``states`` translate an exit's state for K and V above it; None: the state is copied.
    """
    dial = next(each for each in family.dials if each.point(each.most).probes == best.probes)
    points = [selector.loosest_point(dial, share * rise) for share in STRICTNESS]
    return [point_with_translated_kv(point, states) for point in dict.fromkeys(points) if point is not None]


def point_with_translated_kv(point: OperatingPoint, states: StateTranslators | None) -> OperatingPoint:
    """``point`` with K and V above an exit translated by ``states``; None: copied."""
    if states is None:
        return replace(point, schedule="copying")
    return replace(point, schedule="translated", translators=states.digest)


def decode_losses_on_text(
    model: LoadedModel, text: ScreeningText, points: Sequence[OperatingPoint], progress: str | None = None
) -> Losses:
    """Losses of ``points`` on ``text``."""
    return decode_losses(model.stepper, model.geometry, text.windows, points, rows=ROWS, progress=progress)


def certify_points(
    model: LoadedModel,
    text: ScreeningText,
    family: ExitFamily,
    points: Sequence[OperatingPoint],
    settings: ScreeningSettings,
    n_judged_documents: int,
    progress: str | None = None,
) -> Certification:
    """Decode ``points``, from strict to loose, on ``text``, and choose.

    ``n_judged_documents``: documents of evaluation.
    The first point that is neither within the allowed rise nor certified is the last one decoded.

    Raises:
        BadArgument: no points.
    """
    if not points:
        raise BadArgument("points", [], "at least one point")
    require_strict_to_loose(points)
    named = None if progress is None else f"{progress}, full depth"
    whole = take_trace(model.stepper, text.windows, layers=(), progress=named)
    table, risk = losses.replay_losses(whole, model.geometry, []), float(np.log1p(settings.rise))
    tried, fed = list[OperatingPoint](), list[list[TeacherForcedText]]()
    for point in points:
        tried.append(point)
        named = None if progress is None else f"{progress}, {len(tried)} of at most {len(points)}"
        fed.append(losses.teacher_force_at_point(model.stepper, text.windows, point, rows=ROWS, progress=named))
        table = table.join(losses.losses_of_texts(model.stepper, model.geometry, text.windows, point, fed[-1]))
        bounds = losses.bound_rises(table.excess_nats[1:], table.tokens, confirmed_on=n_judged_documents)
        nats, full, tokens = (
            ByDocument(each, table.cluster) for each in (table.nats[1:].T, table.nats[0], table.tokens)
        )
        excess = excess_loss(nats, full, tokens)
        if bounds[-1] > settings.rise and risk_p_values(excess, risk)[-1] > ERROR:
            break  # nor is a looser one, so the sequence of tests ends here
    within = [number for number, bound in enumerate(bounds) if bound <= settings.rise]
    names, digests = [point.name for point in tried], [point.digest for point in tried]
    promise = certify_losses(
        excess, names, EXCESS, text=settings.text_description, digests=digests, risk=risk, seed=settings.seed
    )
    chosen = tried[max(within)] if within else None
    certification = Certification(family, tuple(tried), bounds, table.savings[1:], chosen, promise, None)
    promised = certification.certified_point
    if promised is None:
        return certification
    sample = text.first_windows(ENOUGH_DOCUMENTS)
    known = fed[tried.index(promised)][: len(sample.windows)]
    return replace(
        certification,
        signs=features_of_teacher_forced_texts(known, sample.document_of_window, promised, settings.text_description),
    )
