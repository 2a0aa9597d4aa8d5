"""Why a point behaves as it does: echo, agreement, depth by position, collapse; reported beside the verdicts.

``echo``         share of tokens whose top-1 after layer ℓ is the token that was just read: what a tied unembedding says
                 of a state that is still its own embedding, with low entropy and no foresight.
``agreement``    AUROC of low entropy after layer ℓ for "top-1 is already the last layer's": 0.5 says nothing.
``bound_and_free``  depth with and without the monotone constraint; a token whose free depth exceeds its bound is a late
                 hard one, which the schedule cannot serve (EMAD, "Limitations").
``collapse``     decided tokens before depth is down at the first probe.
``along``        depth with and without the monotone constraint, and entropy, in every doubling of the position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from sklearn.metrics import roc_auc_score

from emad_ref.calibration.trace import Trace
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints
from emad_ref.replay import depths
from emad_ref.sweep.losses import tokens_before


@dataclass(frozen=True)
class Doubling:
    """Means over the ``tokens`` decided at positions ``first`` to ``last``, counted from 1; depths in layers."""

    first: int
    last: int
    tokens: int
    depth: float
    free_depth: float
    entropy_nats: float


def echo_rate(trace: Trace) -> Floats:
    """[L] share of tokens whose top-1 is the token just read."""
    rates: Floats = (trace.top1 == trace.token[:, None]).mean(axis=0)
    return rates


def agreement_auroc(trace: Trace) -> Floats:
    """[L] AUROC of low entropy for agreement with the last layer's top-1; NaN where all or none agree."""
    agrees = trace.top1 == trace.top1[:, -1:]
    return np.array(
        [
            roc_auc_score(agrees[:, layer], -trace.entropy_nats[:, layer])
            if 0 < agrees[:, layer].mean() < 1
            else np.nan
            for layer in range(trace.layers)
        ]
    )


def agreement_rate(trace: Trace) -> Floats:
    """[L] share of tokens whose top-1 is already the last layer's."""
    rates: Floats = (trace.top1 == trace.top1[:, -1:]).mean(axis=0)
    return rates


def along(trace: Trace, point: OperatingPoint) -> list[Doubling]:
    """Positions 1, 2, 3–4, 5–8, … that hold tokens: depth as in ``bound_and_free``, entropy of the last layer."""
    bound, free = bound_and_free(trace, point)
    number = np.frexp(trace.position)[1]  # of a position counted from 0: the doubling that it belongs to
    found = []
    for doubling in np.unique(number).tolist():
        inside = number == doubling
        means = (float(values[inside].mean()) for values in (bound, free, trace.entropy_nats[:, -1]))
        found.append(Doubling(2**doubling // 2 + 1, 2**doubling, int(inside.sum()), *means))
    return found


def bound_and_free(trace: Trace, point: OperatingPoint) -> tuple[Ints, Ints]:
    """[tokens] each: depth under the monotone schedule, and the depth a token takes that may rise again."""
    bound, free = (depths(trace, replace(point, schedule=schedule)) for schedule in ("monotone", "free_eager"))
    return bound, free


def collapse(trace: Trace, point: OperatingPoint) -> float:
    """Median over sequences of decided tokens before depth is at the first probe; inf where most never are."""
    return float(np.median(tokens_before(trace, depths(trace, point), point.probes[0])))
