"""Families of operating points: the margins, thresholds and depths that a sweep replays.

A family is a sweep of one parameter, and families are compared at equal FLOPs. So all have equally many points, spaced
evenly by net saving on the validation split, from full depth to the largest saving of the sweep grid. Even steps of
settings would not suffice: under the monotone schedule one confident token decides for all later ones, and half of a
sweep's savings may be between thresholds of 1e-6 and 1e-4 nats. Fixed truncation and positional depth have all their
points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace
from emad_ref.exit_rules import (
    ALPHA,
    EMAD_FAMILY,
    early_exit_point,
    fixed_entropy_point,
    name_of_margin,
    softmax_response_point,
)
from emad_ref.flop_ledger import flops
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.replay.replay import TraceReplayer, compute_decode_work
from emad_ref.signals import Signal, signals_in_sweep

CHUNK_LENGTHS = (4, 8, 16)  # tokens
FALL_LENGTHS = (8, 32, 128)  # tokens over which positional depth falls
FINEST = 1e-7  # the smallest initial setting of a search, as share of the largest
SEARCH_ROUNDS = 60  # rounds of a search
SPACING_TOLERANCE = 1 / 8  # largest distance of a point from its even place, as share of a step
SETTING_TOLERANCE = 1e-6  # relative distance of settings between which savings jump; thresholds are compared in float32

SavingOfPoint = Callable[[OperatingPoint], float]


@dataclass(frozen=True)
class ThresholdSweep:
    """``point(setting)`` for settings from ``least`` to ``most``: the larger, the larger the saving.

    ``name(setting, digits)``: name of the point, to this number of significant digits.
    """

    point: Callable[[float], OperatingPoint]
    name: Callable[[float, int], str]
    least: float
    most: float

    def make_points(self, settings: Sequence[float]) -> list[OperatingPoint]:
        """Points of the settings, named with as few digits as distinguish all."""
        for digits in range(4, 18):
            names = [self.name(setting, digits) for setting in settings]
            if len(set(names)) == len(settings):
                break
        return [replace(self.point(setting), name=name) for setting, name in zip(settings, names, strict=True)]


class NetSavingFunction:
    """Net saving of a point on one trace, a share of full depth's FLOPs, in which grids are evenly spaced.

    ``replayer``: of that trace.
    """

    def __init__(self, trace: Trace, geometry: Geometry):
        self.replayer, self._geometry = TraceReplayer(trace), geometry
        self._full = self._spent(full_depth(trace.layers))

    def __call__(self, point: OperatingPoint) -> float:
        return 1 - self._spent(point) / self._full

    def _spent(self, point: OperatingPoint) -> int:
        trace, depth = self.replayer.trace, self.replayer.compute_depths(point)
        macs_per_row = trace.macs_per_row.get(point.estimator, 0)
        return flops(compute_decode_work(trace, depth, point, macs_per_row), self._geometry).total


def evenly_spaced_points(dial: ThresholdSweep, saved: SavingOfPoint, count: int) -> list[OperatingPoint]:
    """At most ``count`` points whose savings rise in equal steps, from above none to the sweep's largest.

    A search between neighbouring settings, in equal ratios; at a jump of savings, the nearer side. A sweep without a
    saving, or with one setting, has that one point.
    """
    if dial.most <= dial.least:
        return dial.make_points([dial.most])
    savings = {setting: saved(dial.point(setting)) for setting in _first_settings(dial, count)}
    reach = savings[dial.most]
    if reach <= 0:
        return dial.make_points([dial.most])
    targets = reach * np.arange(1, count) / count
    for _ in range(SEARCH_ROUNDS):
        settings = sorted(savings)
        between = {
            _setting_between(settings, savings, target, SPACING_TOLERANCE * reach / count) for target in targets
        } - {None}
        if not between:
            break
        savings |= {setting: saved(dial.point(setting)) for setting in between if setting is not None}
    nearest = {min(sorted(savings), key=lambda each: abs(savings[each] - target)) for target in targets}
    return dial.make_points(sorted(nearest | {dial.most}))


def _first_settings(dial: ThresholdSweep, count: int) -> list[float]:
    """Both ends of a sweep, and settings in equal ratios between them."""
    least = max(dial.least, FINEST * dial.most)
    return sorted({dial.least, *map(float, np.geomspace(least, dial.most, max(count, 2))[:-1]), dial.most})


def _setting_between(
    settings: Sequence[float], measured: dict[float, float], target: float, near: float
) -> float | None:
    """A setting between the two whose savings enclose ``target``; None if one is near enough, or savings jump."""
    savings = np.array([measured[setting] for setting in settings])
    if np.abs(savings - target).min() <= near:
        return None
    number = int(np.argmax(savings >= target))
    if number == 0:
        return None
    low, high = settings[number - 1], settings[number]
    if high - low <= SETTING_TOLERANCE * high:
        return None
    if low <= 0:
        return high / 8 if high > SETTING_TOLERANCE * FINEST * settings[-1] else None
    share = (target - savings[number - 1]) / (savings[number] - savings[number - 1])
    return float(low * (high / low) ** np.clip(share, 0.25, 0.75))


def _number_text(number: float, digits: int) -> str:
    """The number with two decimals if they suffice."""
    return f"{number:.2f}" if round(number, 2) == number else f"{number:.{digits}g}"


# ---------------------------------------------------------------- threshold sweeps


def margin_sweep(profile: Profile) -> ThresholdSweep:
    """Sweep of EMAD's margin, from the highest target, under which no token exits, down to 0."""
    rows = profile.bin_targets_nats or (profile.targets_nats,)
    highest = max((max(row, default=0.0) for row in rows), default=0.0)

    def name(setting: float, digits: int) -> str:
        return name_of_margin(_number_text(highest - setting, digits), bins=profile.bins)

    return ThresholdSweep(lambda setting: profile.point(highest - setting), name, 0.0, highest)


def margin_points(profile: Profile, saved: SavingOfPoint, count: int) -> list[OperatingPoint]:
    """EMAD points at ``count`` margins, spaced as by ``evenly_spaced_points``, from 0 up."""
    return evenly_spaced_points(margin_sweep(profile), saved, count)[::-1]


def fixed_entropy_points(profile: Profile, saved: SavingOfPoint, count: int) -> list[OperatingPoint]:
    """Fixed-threshold points at ``count`` values of h₀ up to the highest target of the profile.

    EMAD's own thresholds are not higher, so on a flat profile both families are one rule with one parameter, and tie.
    """
    layers, probes = profile.layers, profile.probes
    highest = max((0.0, *profile.targets_nats))
    dial = ThresholdSweep(
        lambda h0: fixed_entropy_point(layers, probes, h0),
        lambda h0, digits: f"fixed h0={_number_text(h0, digits)}",
        0.0,
        highest,
    )
    return evenly_spaced_points(dial, saved, count)


def truncation_points(layers: int) -> list[OperatingPoint]:
    """Fixed truncation at every depth below full."""
    return [truncated(layers, depth) for depth in range(1, layers)]


def softmax_response_points(
    layers: int, probes: Sequence[int], saved: SavingOfPoint, count: int
) -> list[OperatingPoint]:
    """Softmax response at ``count`` thresholds λ from 1 down to 0, under which every token exits."""
    dial = ThresholdSweep(
        lambda doubt: softmax_response_point(layers, probes, 1 - doubt),
        lambda doubt, digits: f"response λ={_confidence_text(doubt, digits)}",
        0.0,
        1.0,
    )
    return evenly_spaced_points(dial, saved, count)


def confidence_sweep(
    signal: str, layers: int, vocabulary: int, minimum: int, pruning: str = "none", alpha: float = ALPHA
) -> ThresholdSweep:
    """Sweep of a monotone confidence rule of ``exit_rules.early_exit_point`` from layer ``minimum`` on, by 1 − λ.

    At 1 a token exits at its first possible layer.

    Raises:
        BadArgument: a rule that does not fit a model of this size.
    """

    def point(doubt: float) -> OperatingPoint:
        sizes = layers, vocabulary, minimum
        return early_exit_point(signal, *sizes, 1 - doubt, pruning=pruning, schedule="monotone", alpha=alpha)

    family = point(1.0).family.replace("_", " ")  # also refuses a rule that does not fit
    return ThresholdSweep(
        point, lambda doubt, digits: f"{family} j={minimum} λ={_confidence_text(doubt, digits)}", 0.0, 1.0
    )


def _confidence_text(doubt: float, digits: int) -> str:
    """Text of λ such as 0, 0.9, 1−0.0018, 1−1.8e-05, since many of its digits would be nines."""
    return f"{1 - doubt:.{digits}g}" if doubt > 0.05 or doubt == 0 else f"1−{doubt:.{digits}g}"


def chunked_points(profile: Profile, saved: SavingOfPoint, count: int) -> list[OperatingPoint]:
    """The EMAD rule applied only at the first token of each chunk: ``count`` points over three chunk lengths."""
    return [
        point
        for number, period in enumerate(CHUNK_LENGTHS)
        for point in evenly_spaced_points(
            _in_chunks(margin_sweep(profile), period), saved, (count + number) // len(CHUNK_LENGTHS)
        )
    ]


def _in_chunks(dial: ThresholdSweep, period: int) -> ThresholdSweep:
    def point(setting: float) -> OperatingPoint:
        return replace(dial.point(setting), family="chunked", schedule="chunked", period=period)

    return replace(dial, point=point, name=lambda setting, digits: f"{dial.name(setting, digits)}, chunks of {period}")


def positional_depth_points(layers: int) -> list[OperatingPoint]:
    """Points with depth that depends only on position, falling to every floor within several numbers of tokens."""
    return [
        OperatingPoint(
            f"falls to {floor} over {period}",
            "positional",
            layers,
            layers,
            schedule="positional",
            period=period,
            floor=floor,
        )
        for floor in range(1, layers)
        for period in FALL_LENGTHS
    ]


def entropy_quantile_points(profile: Profile, saved: SavingOfPoint, count: int) -> list[OperatingPoint]:
    """EMAD with τ_ℓ = q-quantile of H_ℓ, at ``count`` values of q strictly between 0 and 1."""
    dial = ThresholdSweep(
        lambda q: profile.point(quantile=q), lambda q, digits: f"quantile q={q:.{digits}g}", FINEST, 1 - FINEST
    )
    return evenly_spaced_points(dial, saved, count)


def signal_quantile_points(
    signal: Signal, calibration: Trace, probes: Sequence[int], saved: SavingOfPoint, count: int
) -> list[OperatingPoint]:
    """Points of a single-layer signal with τ_ℓ its quantile on calibration text: equal shares pass every probe.

    ``count`` shares of passing tokens, from one token of the text up to 1, under which every token exits at the first
    probe.

    Raises:
        BadArgument: a signal that the trace does not hold.
    """
    column = calibration.signal_at_every_layer(signal.name)[:, np.asarray(probes, dtype=np.int64) - 1].astype(
        np.float64
    )
    called = signal.name.replace("_", " ")

    def point(share: float) -> OperatingPoint:
        return OperatingPoint(
            name=f"{called} p={share}",
            family=f"{signal.name} quantile",
            layers=calibration.layers,
            ceiling=calibration.layers,
            probes=tuple(probes),
            thresholds=(tuple(map(float, np.quantile(ordered, share if falls else 1 - share, axis=0))),),
            signal=signal.name,
        )

    ordered, falls = np.sort(column, axis=0), signal.sense == "falls"
    dial = ThresholdSweep(point, lambda share, digits: f"{called} p={share:.{digits}g}", 1 / len(calibration), 1.0)
    return evenly_spaced_points(dial, saved, count)


SETTINGS_PER_FAMILY = 33  # points of each family, full depth not counted
SAVING_LEVELS = (0.15, 0.30, 0.45, 0.60)  # net savings at which families are compared; 15 % is the paper's least


def point_families(
    profile: Profile, calibration: Trace, saved: SavingOfPoint, count: int
) -> dict[str, list[OperatingPoint]]:
    """Every sweep by its name in tables, ``count`` points each; the first is EMAD as published.

    ``profile`` has entropies only; thresholds of other signals come from ``calibration``, a trace of similar text.
    Points of fixed depths are limited to the layers that ``calibration`` has read.
    ``saved``: saving of a point on the selection split (``grids.NetSavingFunction``).
    """
    layers, probes = profile.layers, profile.probes
    positional = [point for point in positional_depth_points(layers) if calibration.has_layers_for(point)]
    matched = {} if profile.statistics is None else {"EMAD, quantile": entropy_quantile_points(profile, saved, count)}
    return {
        EMAD_FAMILY: margin_points(profile, saved, count),
        **matched,
        "fixed truncation": [point for point in truncation_points(layers) if calibration.has_layers_for(point)],
        "fixed entropy": fixed_entropy_points(profile, saved, count),
        "softmax response": softmax_response_points(layers, probes, saved, count),
        "chunked": chunked_points(profile, saved, count),
        **({"positional": positional} if positional else {}),
        **{
            f"{signal.label}, quantile": signal_quantile_points(signal, calibration, probes, saved, count)
            for signal in signals_in_sweep("front")
        },
    }
