"""How well an entropy estimator stands in for the full softmax, probe by probe (METHODS, "EMAD"; claim EMAD-E4).

    ρ         Spearman's rank correlation of Ĥ and H: whether the order of tokens is kept
    bias      mean of Ĥ − H before correction, nats
    RMSE      √mean (a·Ĥ + c − H)², nats, with a and c fitted on other tokens
    recall@K  share of the true K largest logits that were retrieved
    changed   share of tokens that Ĥ and H put on different sides of τ: exit decisions that would change

Arrays in, numbers out: no model, no corpus. What the changes do to text is decided by replay, not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from emad_ref.errors import BadArgument
from emad_ref.point import Estimator
from emad_ref.record import Floats

NO_RECALL: Mapping[Estimator, Sequence[float]] = {}


@dataclass(frozen=True)
class Agreement:
    """One estimator at one probe, over ``tokens`` tokens.

    ``spearman``   ρ; NaN where either side is constant and so has no order.
    ``corrected``  whether RMSE and decisions are those of a corrected estimate.
    ``recall``     recall@K, None for an estimator that retrieves nothing or was not compared.
    ``changed``    τ in nats → share of decisions that change.
    """

    estimator: Estimator
    probe: int
    tokens: int
    spearman: float
    bias_nats: float
    rmse_nats: float
    corrected: bool
    recall: float | None
    changed: dict[float, float]


def agreement(
    estimator: Estimator,
    probe: int,
    raw: Floats,
    full: Floats,
    line: tuple[float, float] | None = None,
    thresholds: Sequence[float] = (),
    recall: float | None = None,
) -> Agreement:
    """Compare uncorrected estimates ``raw`` [tokens] with entropies ``full`` [tokens], both in nats.

    ``line``: (slope, intercept) of the correction at this probe. ``thresholds``: τ in nats.

    Raises:
        BadArgument: lengths that differ, no tokens, or values that are not finite numbers.
    """
    raw, full = np.asarray(raw, dtype=np.float64), np.asarray(full, dtype=np.float64)
    if raw.ndim != 1 or raw.shape != full.shape or len(raw) == 0:
        raise BadArgument("raw, full", (raw.shape, full.shape), "one estimate and one entropy per token")
    if not (np.isfinite(raw).all() and np.isfinite(full).all()):
        raise BadArgument("raw, full", "NaN or infinite entries", "finite entropies", "leave out what was not read")
    slope, intercept = line or (1.0, 0.0)
    estimate = slope * raw + intercept
    constant = np.ptp(raw) == 0 or np.ptp(full) == 0
    return Agreement(
        estimator=estimator,
        probe=probe,
        tokens=len(full),
        spearman=math.nan if constant else float(stats.spearmanr(raw, full).statistic),
        bias_nats=float(np.mean(raw - full)),
        rmse_nats=float(np.sqrt(np.mean((estimate - full) ** 2))),
        corrected=line is not None,
        recall=recall,
        changed={tau: float(np.mean((estimate <= tau) != (full <= tau))) for tau in thresholds},
    )


def agreements(
    probes: Sequence[int],
    full: Floats,
    raw: Mapping[Estimator, Floats],
    thresholds: Sequence[Sequence[float]] = (),
    recall: Mapping[Estimator, Sequence[float]] = NO_RECALL,
) -> list[Agreement]:
    """One row per estimator and probe, in order.

    Args:
        probes: layers; ``full`` [tokens, probes] entropies after them, nats.
        raw: uncorrected estimates [tokens, probes] by estimator; its own corrections are applied here.
        thresholds: per probe the τ to compare decisions at, in nats; none by default.
        recall: recall@K per probe, by estimator, where it was measured.

    Raises:
        BadArgument: as ``agreement``; columns, thresholds or corrections that do not belong to the probes.
    """
    for name, table in (("full", full), *((estimator.name, table) for estimator, table in raw.items())):
        if np.ndim(table) != 2 or np.shape(table)[1] != len(probes):
            raise BadArgument(name, np.shape(table), f"[tokens, {len(probes)}], one column per probe")
    if thresholds and len(thresholds) != len(probes):
        raise BadArgument("thresholds", thresholds, f"one list per probe ({len(probes)})")
    rows = []
    for estimator, table in raw.items():
        if estimator.correction and len(estimator.correction) != len(probes):
            raise BadArgument("estimator.correction", estimator.correction, f"one line per probe ({len(probes)})")
        for i, probe in enumerate(probes):
            rows.append(
                agreement(
                    estimator,
                    probe,
                    table[:, i],
                    full[:, i],
                    estimator.correction[i] if estimator.correction else None,
                    thresholds[i] if thresholds else (),
                    recall[estimator][i] if estimator in recall else None,
                )
            )
    return rows
