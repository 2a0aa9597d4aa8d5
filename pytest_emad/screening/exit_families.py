"""Families of exits for screening: every kind of exit of this project, most with one parameter from strict to loose.

    readout    the model's own head, or the tuned lens
    criterion  the signals with ``screening`` in their row of ``signals``; a profile minus a margin (EMAD); or none
    depth      free, K and V above an exit filled in; monotone; in chunks; by position
    probes     exit layers: all, every second, every third, a few

Families are replayed with exact K and V; free ones are charged for copying those above an exit. The loss of quality by
copies is measured in ``screening.selection``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.profile import Profile
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import EMAD_FAMILY, FULL_READOUT, threshold_point
from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.replay.grids import (
    CHUNK_LENGTHS,
    ThresholdSweep,
    margin_sweep,
    positional_depth_points,
    truncation_points,
)
from emad_ref.signals import DIVERGENCE, Signal, signals_in_sweep
from pytest_emad.sweep.oracle_savings import FREE_DEPTH

OWN_HEAD, TUNED_LENS = "own head", "tuned lens"


@dataclass(frozen=True, eq=False)
class ExitFamily:
    """One family of the table. ``dials``: the same rule at several sets of probes; ``points``: single points instead.

    ``readout``: ``OWN_HEAD`` or ``TUNED_LENS``. ``depth``: ``free``, ``monotone``, ``in chunks``, ``by position``,
    ``fixed``.
    """

    name: str
    readout: str
    depth: str
    dials: tuple[ThresholdSweep, ...] = ()
    points: tuple[OperatingPoint, ...] = ()


def published_families(profile: Profile, vocabulary: int, read: Sequence[int] | None = None) -> list[ExitFamily]:
    """Families as published, by the model's own head; the first is EMAD.

    ``read``: layers that traces have read; other depths are omitted. None: every layer.
    """
    layers, probes = profile.layers, profile.probes
    allowed = set(range(1, layers + 1)) if read is None else {*read, layers}
    falling = [point for point in positional_depth_points(layers) if allowed.issuperset(point.readout_layers)]
    fixed = [point for point in truncation_points(layers) if allowed.issuperset(point.readout_layers)]
    chunk = CHUNK_LENGTHS[1]
    emad = margin_sweep(profile)

    def chunked(setting: float) -> OperatingPoint:
        return replace(emad.point(setting), family="chunked", schedule="chunked", period=chunk)

    return [
        ExitFamily(EMAD_FAMILY, OWN_HEAD, "monotone", (emad,)),
        *(
            ExitFamily(signal.label, OWN_HEAD, "monotone", (_threshold_sweep(signal, layers, probes, vocabulary),))
            for signal in _plain_signals()
        ),
        ExitFamily(f"EMAD, chunks of {chunk}", OWN_HEAD, "in chunks", (replace(emad, point=chunked),)),
        *([ExitFamily("positional", OWN_HEAD, "by position", points=tuple(falling))] if falling else []),
        ExitFamily("truncation", OWN_HEAD, "fixed", points=tuple(fixed)),
    ]


def free_depth_families(layers: int, vocabulary: int, read: Sequence[int] | None = None) -> list[ExitFamily]:
    """Free depth by the model's own head; softmax response is CALM. ``read``: as in ``published_families``."""
    sets = candidate_probe_sets(layers, read)
    return [
        ExitFamily(
            signal.label,
            OWN_HEAD,
            "free",
            tuple(_with_free_depth(_threshold_sweep(signal, layers, probes, vocabulary)) for probes in sets),
        )
        for signal in _plain_signals()
    ]


def tuned_lens_families(fitted: FittedLens, vocabulary: int) -> list[ExitFamily]:
    """Families through a lens with a gate, monotone and free.

    Raises:
        BadArgument: a lens without a gate.
    """
    if fitted.gate is None:
        raise BadArgument("fitted.gate", None, "a lens with a gate", "fit one: emad lens … --exit-gate")
    lens, gate = fitted.lens, fitted.gate
    layers, lens_layers = lens.layers, tuple(lens.translators)
    rows = dict(zip(lens_layers, gate.weights, strict=True))
    sets = candidate_probe_sets(layers, lens_layers)

    def read(dial: ThresholdSweep) -> ThresholdSweep:
        return replace(dial, point=lambda setting: replace(dial.point(setting), lens=lens.digest))

    def gated(probes: Sequence[int]) -> ThresholdSweep:
        estimator = replace(gate, weights=tuple(rows[probe] for probe in probes))
        return _threshold_sweep(DIVERGENCE, layers, probes, vocabulary, estimator)

    rules = {DIVERGENCE.label: [read(gated(probes)) for probes in sets]} | {
        signal.label: [read(_threshold_sweep(signal, layers, probes, vocabulary)) for probes in sets]
        for signal in _plain_signals()
    }
    return [
        ExitFamily(name, TUNED_LENS, depth, tuple(dials if depth == "monotone" else map(_with_free_depth, dials)))
        for depth in ("monotone", "free")
        for name, dials in rules.items()
    ]


def candidate_probe_sets(layers: int, among: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Sets of exit layers, all layers first, each once: of ``among``, by default all below the last.

    >>> candidate_probe_sets(5)
    [(1, 2, 3, 4), (1, 3), (2, 4), (3,), (2, 3), (1, 2, 4)]
    """
    offered = list(range(1, layers)) if among is None else list(among)
    third, quarter = layers / 3, layers / 4
    candidates = [
        offered,
        [layer for layer in offered if layer % 2 == layers % 2],
        [layer for layer in offered if layer % 2 != layers % 2],
        [layer for layer in offered if layer % 3 == 0],
        [_nearest(offered, third), _nearest(offered, 2 * third)],
        [_nearest(offered, part * quarter) for part in (1, 2, 3)],
    ]
    return list(dict.fromkeys(tuple(sorted(set(each))) for each in candidates if each))


def _nearest(offered: Sequence[int], place: float) -> int:
    return min(offered, key=lambda layer: abs(layer - place))


# ---------------------------------------------------------------- threshold sweeps


def _with_free_depth(dial: ThresholdSweep) -> ThresholdSweep:
    return replace(dial, point=lambda setting: replace(dial.point(setting), schedule=FREE_DEPTH))


def _plain_signals() -> list[Signal]:
    return [signal for signal in signals_in_sweep("screening") if signal.needs_only_thresholds]


def _threshold_sweep(
    signal: Signal, layers: int, probes: Sequence[int], vocabulary: int, estimator: EntropyEstimator = FULL_READOUT
) -> ThresholdSweep:
    """Thresholds on ``signal`` from strictest to loosest, by their distance from the strictest."""
    span = signal.thresholds
    assert span is not None, f"{signal.name} is screened, so its row has thresholds"
    strictest, towards = span.strictest, 1 if signal.sense == "falls" else -1

    def point(setting: float) -> OperatingPoint:
        return threshold_point(signal, layers, probes, strictest + towards * setting, estimator)

    return ThresholdSweep(
        point,
        lambda setting, digits: f"{span.distance} ≤ {setting:.{digits}g}",
        0.0,
        abs(span.loosest(vocabulary) - strictest),
    )
