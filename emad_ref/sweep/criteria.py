"""Rivals on one readout: what may decide that a token leaves, at the same probes, by one threshold for all of them.

    entropy           H(q_ℓ) ≤ τ
    softmax response  top-1 − top-2 of q_ℓ ≥ τ
    gate              w_ℓ·norm(h_ℓ) + c_ℓ ≤ τ, expected √KL (``calibration.gate``): no head is read where a token stays
    agreement         top-1 of q_ℓ ≥ τ, and the probe before leads with the same token
    saturation        cos(h_ℓ, h_{ℓ−1}) ≥ τ: neither a head nor anything fitted

q_ℓ is read by the model's own head or through a tuned lens, whatever the trace was taken through; so is what a token
emits. Thresholds are spread over what text says that points are chosen on, not over all that they could be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emad_ref.calibration.rules import Rule
from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.point import Confidence, Estimator, OperatingPoint, ScheduleName
from emad_ref.record import Floats
from emad_ref.signals import ENTROPY, RESPONSE, SIGNALS, layers_read
from emad_ref.sweep.ceilings import FREE

GATE, SATURATION = "gate", "saturation"
CRITERIA = {  # name in tables → signal
    "entropy": ENTROPY.name,
    "softmax response": RESPONSE.name,
    GATE: "divergence",
    "agreement": "agreement",
    SATURATION: "saturation",
}
COUNT = 64  # thresholds of each
LOWEST = 2  # the first layer that has one below it to compare with


def saturation(layers: int, lens: str | None = None, schedule: ScheduleName = FREE) -> OperatingPoint:
    """The rule at every layer, never firing: what a trace has to record for it (``take_trace(rules=…)``)."""
    probes = layers_read("saturation", LOWEST, layers)
    return OperatingPoint(
        "saturation",
        "saturation",
        layers,
        layers,
        probes,
        ((np.inf,) * len(probes),),
        schedule,
        signal="saturation",
        confidence=Confidence(LOWEST),
        lens=lens,
    )


def gate_at(trace: Trace, gate: Estimator, fitted: Sequence[int], probes: Sequence[int]) -> tuple[Trace, Estimator]:
    """The gate asked at ``probes`` alone, of those that it was ``fitted`` at, and the trace that knows its readings.

    Raises:
        BadArgument: probes that it was not fitted at; a trace that does not record it.
    """
    missing = [probe for probe in probes if probe not in fitted]
    if missing or gate not in trace.estimates:
        at = ", ".join(map(str, fitted))
        raise BadArgument("probes", missing or list(probes), f"layers of the gate ({at}) in a trace that records it")
    asked = replace(gate, weights=tuple(gate.weights[list(fitted).index(probe)] for probe in probes))
    known = replace(
        trace,
        estimates={**trace.estimates, asked: trace.estimates[gate]},
        macs_per_row={**trace.macs_per_row, asked: trace.macs_per_row[gate]},
    )
    return known, asked


def criteria(
    trace: Trace,
    probes: Sequence[int],
    gate: Estimator | None = None,
    *,
    schedule: ScheduleName = FREE,
    count: int = COUNT,
) -> dict[str, list[OperatingPoint]]:
    """Each criterion at up to ``count`` thresholds from what hardly any token reaches to what all do; strict first.

    ``gate``: as ``gate_at`` gives it for these probes; None: left out. Saturation is left out of a trace that does not
    record it, and decides at those of the probes that have a layer below them.

    Raises:
        BadArgument: probes that are not ascending layers below the last; a gate that ``trace`` does not record.
    """
    layers, lens = trace.layers, trace.lens
    never = saturation(layers, lens, schedule)
    found = {}
    for name, signal in CRITERIA.items():
        plain = OperatingPoint(
            name, name, layers, layers, tuple(probes), ((SIGNALS[signal].never,) * len(probes),), schedule,
            (gate or Estimator("linear")) if name == GATE else Estimator(), signal, lens=lens,
        ) if name != SATURATION else never  # fmt: skip
        if (name == GATE and gate is None) or (name == SATURATION and Rule.of(never) not in trace.rules):
            continue
        found[name] = [_at(plain, probes, float(level)) for level in _levels(trace, plain, probes, count)]
    return found


def _levels(trace: Trace, point: OperatingPoint, probes: Sequence[int], count: int) -> Floats:
    """Thresholds at even shares of the signal's values at ``probes``, in the order in which more tokens leave.

    Of its distinct values: where two probes disagree there is one, however often they do.
    """
    seen = trace.signal(point)[:, [probe - 1 for probe in probes]].astype(np.float64)
    levels = np.unique(np.quantile(np.unique(seen[np.isfinite(seen)]), np.linspace(0, 1, count)))
    return levels if SIGNALS[point.signal].sense == "falls" else levels[::-1]


def _at(point: OperatingPoint, probes: Sequence[int], level: float) -> OperatingPoint:
    never, first = SIGNALS[point.signal].never, LOWEST if point.confidence is not None else 1
    row = tuple(level if probe in probes and probe >= first else never for probe in point.probes)
    return replace(point, name=f"{point.family} {level:.6g}", thresholds=(row,))
