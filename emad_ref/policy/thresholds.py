"""Rules as plain points: where thresholds come from.

Every rule here is the same comparison of signal_ℓ with τ_ℓ, with another τ:

``emad``           τ_ℓ = isotonic(mean H_ℓ) − m (EMAD, "Calibration details"); the calibrated targets are an argument.
``fixed_entropy``  τ_ℓ = h₀ at every probe (EMAD's confidence baseline).
``softmax_response``  λ at every probe, on another signal that rises (CALM); the rest of its kin: ``early_exit``.
``full``, ``truncation``  no probes; see ``emad_ref.point``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.record import Bools, Floats, Ints
from emad_ref.signals import RESPONSE, SIGNALS

EXACT_DIGITS = 17  # with so many a float64 reads back as itself


def default_probes(layers: int) -> tuple[int, ...]:
    """Every 4 layers for small models, every 8 from 32 layers on (EMAD, "Calibration data"); every 2 below 12."""
    stride = 2 if layers < 12 else 4 if layers < 32 else 8
    return tuple(range(stride, layers, stride))


def entropy_matched(
    layers: int,
    probes: Sequence[int],
    targets_nats: Sequence[float],
    margin_nats: float = 0.0,
    schedule: str = "monotone",
) -> OperatingPoint:
    """EMAD: exit at the first probe ℓ with H_ℓ ≤ targets_nats[ℓ] − margin_nats."""
    return OperatingPoint(
        name=f"emad m={short(margin_nats)}" + ("" if schedule == "monotone" else f" {schedule}"),
        family="emad",
        layers=layers,
        ceiling=layers,
        probes=tuple(probes),
        thresholds=(tuple(float(target) - margin_nats for target in targets_nats),),
        schedule=schedule,  # type: ignore[arg-type]  # the point validates the name and says which exist
        margin_nats=margin_nats,
    )


def short(number: float) -> str:
    """Two decimals where they say it all, else four digits: points of one sweep must not share a name."""
    return f"{number:.2f}" if round(number, 2) == number else f"{number:.4g}"


def apart(numbers: Sequence[float]) -> list[str]:
    """Each number as ``short`` has it, with more digits where two different ones would read as the same value.

    >>> apart([0.3, 0.300001, 0.3, 0.5])
    ['0.30', '0.300001', '0.30', '0.50']
    """
    texts = [short(number) for number in numbers]
    for digits in range(5, EXACT_DIGITS + 1):
        read: dict[float, set[float]] = {}  # value as read back → the numbers that it may mean
        for text, number in zip(texts, numbers, strict=True):
            read.setdefault(float(text), set()).add(number)
        texts = [
            text if float(text) == number or len(read[float(text)]) == 1 else f"{number:.{digits}g}"
            for text, number in zip(texts, numbers, strict=True)
        ]
    return texts


def spelled(point: OperatingPoint, margin: str) -> OperatingPoint:
    """An EMAD point under the name in which its margin is spelled ``margin``."""
    assert point.margin_nats is not None
    return replace(point, name=point.name.replace(f"m={short(point.margin_nats)}", f"m={margin}", 1))


def fixed_entropy(layers: int, probes: Sequence[int], h0_nats: float) -> OperatingPoint:
    """One threshold h₀ for every probe, no profile."""
    return OperatingPoint(
        name=f"fixed h0={short(h0_nats)}",
        family="fixed_entropy",
        layers=layers,
        ceiling=layers,
        probes=tuple(probes),
        thresholds=((h0_nats,) * len(tuple(probes)),),
    )


def response(layers: int, probes: Sequence[int], threshold: float) -> OperatingPoint:
    """Softmax response (CALM): exit where top-1 minus top-2 probability is ≥ ``threshold``; above 1 nothing exits."""
    return OperatingPoint(
        name=f"response λ={short(threshold)}",
        family=RESPONSE.name,
        layers=layers,
        ceiling=layers,
        probes=tuple(probes),
        thresholds=((threshold,) * len(tuple(probes)),),
        signal=RESPONSE.name,
    )


def decayed(decay: tuple[float, float], decided: NDArray[np.integer[Any]]) -> Floats:
    """0.9 + 0.1·exp(−rate·t/N), the shape of ``decided``: what thresholds are multiplied by (CALM).

    ``decay``: (rate, N). ``decided``: t, the index from 0 of a token among the decided ones of its sequence; the first
    has the whole threshold.
    """
    rate, longest = decay
    factor: Floats = 0.9 + 0.1 * np.exp(-rate * decided.astype(np.float64) / longest)
    return factor


def fires(
    point: OperatingPoint,
    probe: int,
    signal: NDArray[np.floating[Any]],
    bins: NDArray[np.integer[Any]] | None = None,
    decided: NDArray[np.integer[Any]] | None = None,
) -> Bools:
    """Whether the rule at ``point.probes[probe]`` fires on ``signal``, any shape; NaN never fires.

    ``bins``: which row of thresholds each signal belongs to, the shape of ``signal``; needed where there are several.
    ``decided``: index of each token among the decided ones of its sequence, of a shape that broadcasts to ``signal``'s;
    needed where thresholds decay.

    The one comparison of the package, for replay and decoding alike. The threshold is rounded to float32, as the
    signals are: one that lies between two floats must fall to the same side everywhere.

    Raises:
        BadArgument: several rows of thresholds without bins, decaying ones without the tokens' indices.
    """
    column = point.table[:, probe]
    if bins is None and len(column) > 1:
        raise BadArgument("bins", None, f"a bin in 0–{len(column) - 1} for every signal", "see policy.bins")
    threshold = column[0] if bins is None else column[bins]
    if point.decay is not None:
        if decided is None:
            raise BadArgument("decided", None, "the index of every decided token", "these thresholds fall with it")
        threshold = (threshold * decayed(point.decay, decided)).astype(np.float32)
    fired: Bools = signal <= threshold if SIGNALS[point.signal].sense == "falls" else signal >= threshold
    return fired


def first_fires(fired: Bools, probes: Ints, ceiling: int) -> Ints:
    """[n] smallest probe that fires, ``ceiling`` where none does; ``fired`` [n, probes] with ``probes`` ascending."""
    if len(probes) == 0:
        return np.full(len(fired), ceiling, dtype=np.int64)
    first = np.argmax(fired, axis=1)
    return np.where(fired.any(axis=1), np.asarray(probes, dtype=np.int64)[first], ceiling)


def planned_exits(
    point: OperatingPoint,
    probe: int,
    before: NDArray[np.floating[Any]],
    here: NDArray[np.floating[Any]],
    bins: NDArray[np.integer[Any]] | None = None,
) -> Ints:
    """The first layer between ``point.probes[probe]`` and the next at which extrapolation meets its threshold; 0: none.

    Ĥ_ℓ continues the line through the readings ``before`` and ``here`` at the last two probes, τ_ℓ lies on the line
    between the thresholds of this probe and the next (EMAD, "Exit to non-probe layers"; METHODS, "Non-probe exits").
    After the last probe there is no next threshold, and after the first there is no line.
    """
    none = np.zeros(here.shape, dtype=np.int64)
    if not 0 < probe < len(point.probes) - 1:
        return none
    left, at, right = point.probes[probe - 1 : probe + 2]
    near, far = (point.table[0, i] if bins is None else point.table[bins, i] for i in (probe, probe + 1))
    slope = (here - before) / np.float32(at - left)
    for layer in reversed(range(at + 1, right)):  # the shallowest that fires is written last
        share = np.float32((layer - at) / (right - at))
        expected, threshold = here + slope * np.float32(layer - at), near + (far - near) * share
        met = expected <= threshold if SIGNALS[point.signal].sense == "falls" else expected >= threshold
        np.copyto(none, layer, where=met)
    return none
