"""Components of EMAD: each exchanged alone, from EMAD as published and from the best combination of all.

    readout     the model's own head              | a tuned lens
    criterion   entropy ≤ its profile minus a margin | a gate; and an oracle, which knows √KL
    depth       only falls                        | free
    K/V         exact, computed above a free exit when a deeper token needs it | copied from the exit state

Depth that only falls needs no K/V above an exit, so exchanging K/V alone changes nothing there. Between combinations
free depth is replayed with exact states and charged as if copied (``oracle_savings.sequence_flops_with_fill_cost``).
This ignores the loss by copies. For the best combination truly copied states are decoded. Back from it to exact K/V
they are charged in full. Each combination's parameter maximises the net saving with a rise of perplexity of at most
``level`` on the selection split; another split judges it.

Criteria decide exits on one readout, at the same probes and by one threshold for all of them. They are the signals with
``criterion`` in their row of ``signals``, among them:

    entropy           H(q_ℓ) ≤ τ
    softmax response  top-1 − top-2 of q_ℓ ≥ τ
    gate              w_ℓ·norm(h_ℓ) + c_ℓ ≤ τ, expected √KL (``fit_gate``): no head is read where a token stays
    agreement         top-1 of q_ℓ ≥ τ, and the probe before leads with the same token
    saturation        cos(h_ℓ, h_{ℓ−1}) ≥ τ: neither a head nor anything fitted

q_ℓ is read by the model's own head or through a tuned lens, whatever readout the trace used. Thresholds are spread over
the values on the selection text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from emad_ref.absent import Absent
from emad_ref.calibration.confidence_columns import ConfidenceColumnsKey
from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace
from emad_ref.models.geometry import Geometry
from emad_ref.point import ConfidenceParameters, EntropyEstimator, OperatingPoint, ScheduleName
from emad_ref.record import Floats
from emad_ref.replay.losses import Losses, PointLoss, replay_losses
from emad_ref.signals import DIVERGENCE, SATURATION, SIGNALS, required_layers, signals_in_sweep
from pytest_emad.sweep.oracle_savings import (
    FINEST_THRESHOLD,
    FREE_DEPTH,
    JUDGED_RISE,
    oracle_divergence_point,
    replay_losses_with_fill_cost,
    space_thresholds,
    with_oracle_signal,
)

CRITERION_THRESHOLDS = 64  # thresholds of each criterion
FIRST_COMPARED = 2  # the first layer with a lower layer to compare with


def no_exit_saturation_operating_point(
    layers: int, lens: str | None = None, schedule: ScheduleName = FREE_DEPTH
) -> OperatingPoint:
    """The saturation rule at every layer, never firing, for ``take_trace(rules=…)``."""
    probes = required_layers(SATURATION.name, FIRST_COMPARED, layers)
    return OperatingPoint(
        SATURATION.label,
        SATURATION.label,
        layers,
        layers,
        probes,
        ((SATURATION.unreachable_threshold,) * len(probes),),
        schedule,
        signal=SATURATION.name,
        confidence=ConfidenceParameters(FIRST_COMPARED),
        lens=lens,
    )


def restrict_trace_gate_to_probes(
    trace: Trace, gate: EntropyEstimator, fitted: Sequence[int], probes: Sequence[int]
) -> tuple[Trace, EntropyEstimator]:
    """The gate restricted to ``probes``, a subset of its ``fitted`` layers, and the trace with its readings."""
    selected = replace(gate, weights=tuple(gate.weights[list(fitted).index(probe)] for probe in probes))
    trace_of_gate = replace(
        trace,
        estimates={**trace.estimates, selected: trace.estimates[gate]},
        macs_per_row={**trace.macs_per_row, selected: trace.macs_per_row[gate]},
    )
    return trace_of_gate, selected


def points_by_criterion(
    trace: Trace,
    probes: Sequence[int],
    gate: EntropyEstimator | None = None,
    *,
    schedule: ScheduleName = FREE_DEPTH,
    count: int = CRITERION_THRESHOLDS,
) -> dict[str, list[OperatingPoint]]:
    """Each criterion at up to ``count`` thresholds, from one that few tokens reach to one that all reach.

    ``gate``: as from ``restrict_trace_gate_to_probes`` for these probes; None: left out. Saturation is left out if the
    trace does not record it, and decides only at probes with a layer below them.

    Raises:
        BadArgument: probes that are not ascending layers below the last; a gate that ``trace`` does not record.
    """
    layers, lens = trace.layers, trace.lens
    saturated = no_exit_saturation_operating_point(layers, lens, schedule)
    families = {}
    for signal in signals_in_sweep("criterion"):
        if signal is SATURATION:
            if ConfidenceColumnsKey.from_point(saturated) not in trace.rules:
                continue
            never = saturated
        elif signal.is_learned and gate is None:
            continue
        else:
            thresholds = ((signal.unreachable_threshold,) * len(probes),)
            estimator = gate if signal.is_learned and gate else EntropyEstimator()
            never = OperatingPoint(
                signal.label, signal.label, layers, layers, tuple(probes), thresholds, schedule, estimator, signal.name,
                lens=lens,
            )  # fmt: skip
        levels = _threshold_levels(trace, never, probes, count)
        families[signal.label] = [_point_at(never, probes, float(level)) for level in levels]
    return families


def _threshold_levels(trace: Trace, point: OperatingPoint, probes: Sequence[int], count: int) -> Floats:
    """Thresholds at even shares of the signal's distinct values at ``probes``, by rising number of exits.

    A signal with a common value, such as 0 for disagreeing probes, has it once.
    """
    values = trace.rule_signal(point)[:, [probe - 1 for probe in probes]].astype(np.float64)
    levels = np.unique(np.quantile(np.unique(values[np.isfinite(values)]), np.linspace(0, 1, count)))
    return levels if SIGNALS[point.signal].sense == "falls" else levels[::-1]


def _point_at(point: OperatingPoint, probes: Sequence[int], level: float) -> OperatingPoint:
    never, first = SIGNALS[point.signal].unreachable_threshold, FIRST_COMPARED if point.confidence is not None else 1
    row = tuple(level if probe in probes and probe >= first else never for probe in point.probes)
    return replace(point, name=f"{point.family} {level:.6g}", thresholds=(row,))


Split = Literal["chosen", "judged"]
Criterion = Literal["profile", "gate", "oracle"]
Depth = Literal["falling", "free"]
Kept = Literal["exact", "as if copied", "copied"]
Decoded = Callable[[Split, Sequence[OperatingPoint]], Losses]

COMBINATION_SETTINGS = 48  # settings of each parameter
TRIES = 5  # decoded settings of copied K and V, ever stricter, to find one within the level
SCHEDULES: dict[tuple[Depth, Kept], ScheduleName] = {
    ("falling", "exact"): "monotone",
    ("free", "exact"): "free_deferred",
    ("free", "as if copied"): FREE_DEPTH,
    ("free", "copied"): "copying",
}


@dataclass(frozen=True, eq=False)
class SingleReadoutTraces:
    """Traces through one readout: selection and judged text, and its calibration.

    ``profile``: of calibration text; all combinations use its probes. ``gate``: at those probes, recorded in both
    traces, or None. Divergences are recorded too.
    """

    name: str
    chosen: Trace
    judged: Trace
    profile: Profile
    gate: EntropyEstimator | None = None


@dataclass(frozen=True)
class ComponentCombination:
    """One combination of components. ``lens``: whether readouts go through it."""

    lens: bool
    criterion: Criterion
    depth: Depth
    kept: Kept

    @property
    def name(self) -> str:
        """E.g. ``tuned lens, gate, free depth, K/V copied``."""
        kv_suffix = "" if self.depth == "falling" else f", K/V {self.kept}"
        return f"{'tuned lens' if self.lens else 'own head'}, {self.criterion}, {self.depth} depth{kv_suffix}"


PUBLISHED = ComponentCombination(False, "profile", "falling", "exact")
BEST = ComponentCombination(True, "gate", "free", "as if copied")


@dataclass(frozen=True, eq=False)
class TunedCombination:
    """A combination at its chosen setting, with its ``loss`` on the judged text.

    Its point is full depth if nothing saves within the level; an oracle's point is for replays only.
    """

    way: ComponentCombination
    loss: PointLoss

    @property
    def point(self) -> OperatingPoint:
        return self.loss.point


@dataclass(frozen=True, eq=False)
class SingleComponentExchange:
    """``part`` exchanged alone: ``after`` differs from ``before`` only in it.

    ``back``: from the best combination to EMAD's.
    """

    part: str
    before: TunedCombination
    after: TunedCombination
    back: bool


def exchange_each_component(
    own: SingleReadoutTraces,
    lens: SingleReadoutTraces,
    geometry: Geometry,
    *,
    level: float = JUDGED_RISE,
    count: int = COMBINATION_SETTINGS,
    decoded: Decoded | None = None,
) -> list[SingleComponentExchange]:
    """Exchange every part from EMAD as published, and every part of the best combination back.

    Without a gate of the own head its single exchange, and the readout's way back, use the oracle on both sides.
    ``decoded``: losses of points on the text of a split with copied K and V (``replay.losses``); None: left out.

    Raises:
        BadArgument: traces that lack the divergence, or a gate; as ``replay``.
    """
    tuned: dict[ComponentCombination, TunedCombination] = {}

    def at(way: ComponentCombination) -> TunedCombination:
        if way not in tuned:
            tuned[way] = _tuned_combination(way, lens if way.lens else own, geometry, level, count, decoded)
        return tuned[way]

    gated = own.gate is not None
    alone = [
        ("readout", replace(PUBLISHED, lens=True)),
        *([("criterion", replace(PUBLISHED, criterion="gate"))] if gated else []),
        ("criterion, by an oracle", replace(PUBLISHED, criterion="oracle")),
        ("monotone rule", replace(PUBLISHED, depth="free", kept="as if copied")),
    ]
    judge = BEST if gated else replace(BEST, criterion="oracle")
    back = [
        ("readout", judge, replace(judge, lens=False)),
        ("criterion", BEST, replace(BEST, criterion="profile")),
        ("monotone rule", BEST, replace(BEST, depth="falling", kept="exact")),
        ("K/V", BEST, replace(BEST, kept="exact")),
    ]
    further = [("criterion, by an oracle", BEST, replace(BEST, criterion="oracle"))]
    if decoded is not None:
        further.append(("K/V, truly copied", BEST, replace(BEST, kept="copied")))
    return [
        *(SingleComponentExchange(part, at(PUBLISHED), at(way), False) for part, way in alone),
        *(SingleComponentExchange(part, at(before), at(after), True) for part, before, after in back),
        *(SingleComponentExchange(part, at(before), at(after), False) for part, before, after in further),
    ]


# ---------------------------------------------------------------- one combination


def _tuned_combination(
    way: ComponentCombination,
    readout: SingleReadoutTraces,
    geometry: Geometry,
    level: float,
    count: int,
    decoded: Decoded | None,
) -> TunedCombination:
    points = _combination_points(way, readout, count)
    traces = [
        with_oracle_signal(trace) if way.criterion == "oracle" else trace for trace in (readout.chosen, readout.judged)
    ]
    chosen, judged = (_combination_losses(way, trace, geometry, points) for trace in traces)
    best = chosen.choose("flops", chosen.rises <= level)
    assert not isinstance(best, Absent), "full depth is within every level"
    if way.kept != "copied" or best.index == 0:
        return TunedCombination(way, judged[best.index])
    assert decoded is not None, "copied K and V are asked for with their decoder alone"
    stricter = [best.index - (2**tried - 1) for tried in range(TRIES)]
    for point in (points[number - 1] for number in stricter if number >= 1):
        if chosen.select([0]).join(decoded("chosen", [point])).rises[1] <= level:
            return TunedCombination(way, judged.select([0]).join(decoded("judged", [point]))[1])
    return TunedCombination(way, judged[0])


def _combination_losses(
    way: ComponentCombination, trace: Trace, geometry: Geometry, points: Sequence[OperatingPoint]
) -> Losses:
    """Losses by replay; for copied K and V with those of exact ones, to start the search."""
    if way.kept == "exact":
        return replay_losses(trace, geometry, points)
    return replay_losses_with_fill_cost(trace, geometry, [replace(point, schedule=FREE_DEPTH) for point in points])


def _combination_points(way: ComponentCombination, readout: SingleReadoutTraces, count: int) -> list[OperatingPoint]:
    """Points of the combination's parameter on this readout, strict first."""
    schedule, profile, trace = SCHEDULES[way.depth, way.kept], readout.profile, readout.chosen
    if way.criterion == "gate":
        points = points_by_criterion(trace, profile.probes, readout.gate, schedule=schedule, count=count)
        return points[DIVERGENCE.label]
    if way.criterion == "oracle":
        root_divergence = np.sqrt(trace.divergence()[:, [probe - 1 for probe in profile.probes]])
        settings = space_thresholds(root_divergence, count)
        return [
            replace(oracle_divergence_point(trace, float(setting), profile.probes), schedule=schedule)
            for setting in settings
        ]
    return [
        replace(profile.point(float(margin)), schedule=schedule, lens=trace.lens)
        for margin in _margin_settings(trace, profile, count)
    ]


def _margin_settings(trace: Trace, profile: Profile, count: int) -> Floats:
    """Margins from the highest target, under which nothing leaves, down to 0: distances of entropies to their targets.

    It adds equal ratios of the highest target: one confident token decides for all later ones.
    """
    highest, probes = max(profile.targets_nats), [probe - 1 for probe in profile.probes]
    room = (np.asarray(profile.targets_nats) - trace.entropy_nats[:, probes]).max(axis=1)
    even = np.quantile(np.clip(room, 0.0, highest), np.linspace(0, 1, count - count // 3))
    fine = highest - np.geomspace(FINEST_THRESHOLD * highest, highest, count // 3)
    margins: Floats = np.unique(np.concatenate([even, fine, [0.0, highest]]))[::-1]
    return margins
