"""What a rule gives on signals in full, with room for rounding: the audit's own reading of an operating point.

Written without ``policy.thresholds``, in float64, because it is the judge of it:

    headroom_ℓ   τ_ℓ − Ĥ_ℓ (signals that fall), Ĥ_ℓ − τ_ℓ (that rise); the token stops at the first ℓ where it is ≥ 0
    noise_ℓ      how far it may honestly be off, in multiples of a logit's tolerance

Thresholds may depend on the token's bin and fall with the decided tokens t (CALM): τ·(0.9 + 0.1·e^(−rate·t/N)). Where
exits may lie between probes (EMAD, "Exit to non-probe layers"), Ĥ continues the line through the last two readings and
τ lies on the line to the next threshold: an error of both readings grows with the distance.
"""

from __future__ import annotations

import numpy as np

from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import first_fires
from emad_ref.record import Bools, Floats, Ints
from emad_ref.signals import SIGNALS


def noise_of(point: OperatingPoint) -> float:
    """How far a signal may be off at a probe, in multiples of a logit's tolerance."""
    slopes = [abs(slope) for slope, _ in point.estimator.correction]
    return SIGNALS[point.signal].noise * max(1.0, *slopes) if slopes else SIGNALS[point.signal].noise


def emission_noise(point: OperatingPoint) -> float:
    """How far what a token emits may be off, in multiples of a logit's tolerance: a contrast adds up several."""
    return 1.0 if SIGNALS[point.signal].alone else SIGNALS[point.signal].noise


def tied_gap(point: OperatingPoint, tolerance: float) -> float:
    """The gap between two logits of what is emitted below which either may lead: each may be off by the tolerance."""
    return 2 * tolerance * emission_noise(point)


def thresholds_of(point: OperatingPoint, rows: Ints) -> Floats:
    """[m, probes] thresholds of decided tokens in order, a sequence's first of them first; ``rows`` [m] their bins."""
    thresholds: Floats = np.array(point.thresholds, dtype=np.float64)[rows]
    if point.decay is not None:
        rate, longest = point.decay
        thresholds = thresholds * (0.9 + 0.1 * np.exp(-rate * np.arange(len(rows)) / longest))[:, None]
    return thresholds


def headroom(point: OperatingPoint, signal: Floats, rows: Ints) -> tuple[Floats, Floats]:
    """(headroom [m, L], −inf where nothing is decided; noise [L]) of ``signal`` [m, probes] in bins ``rows`` [m]."""
    sense = -1.0 if SIGNALS[point.signal].sense == "falls" else 1.0
    room, noise = np.full((len(signal), point.layers), -np.inf), np.full(point.layers, noise_of(point))
    thresholds = thresholds_of(point, rows)
    with np.errstate(invalid="ignore"):  # inf − inf: a threshold that nothing reaches decides nothing
        for number, probe in enumerate(point.probes):
            room[:, probe - 1] = sense * (signal[:, number] - thresholds[:, number])
        for number in range(1, len(point.probes) - 1) if point.interpolate else ():
            left, at, right = point.probes[number - 1 : number + 2]
            before, here, near, far = (*signal.T[number - 1 : number + 1], *thresholds.T[number : number + 2])
            for layer in range(at + 1, right):
                run, share = (layer - at) / (at - left), (layer - at) / (right - at)
                room[:, layer - 1] = sense * (here + (here - before) * run - (near + (far - near) * share))
                noise[layer - 1] *= 1 + 2 * run
    return np.where(np.isnan(room), -np.inf, room), noise


def depths_of(point: OperatingPoint, room: Floats, cap: Ints) -> Ints:
    """[m] the first layer with ``room`` [m, L] ≥ 0, at most ``cap`` [m]."""
    layers = np.arange(1, point.ceiling)
    return np.minimum(cap, first_fires(room[:, : point.ceiling - 1] >= 0, layers, point.ceiling))


def may_fire(point: OperatingPoint, signal: Floats, rows: tuple[Ints, ...]) -> Bools:
    """[m, probes] whether any value could fire there, under every one of ``rows``; not where no signal is defined."""
    never = SIGNALS[point.signal].never
    may: Bools = np.logical_and.reduce([thresholds_of(point, one) != never for one in rows]) & ~np.isnan(signal)
    return may


def tied(point: OperatingPoint, signal: Floats, rows: tuple[Ints, ...], tolerance: float) -> Bools:
    """[m] whether some comparison, or the choice of the bin, lies within ``tolerance`` (of a logit)."""
    near: Bools = np.zeros(len(signal), dtype=bool)
    for one in rows:
        room, noise = headroom(point, signal, one)
        near |= (np.abs(room) <= tolerance * noise).any(axis=1) | (one != rows[0])
    return near
