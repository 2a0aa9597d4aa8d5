"""Oracles: savings of rules with free knowledge of every readout's divergence from the final output.

    d_ℓ = KL(p_L ‖ q_ℓ)      of each token and layer, recorded in a trace (``take_trace(divergence=True)``)

``threshold``  a token exits at the first probe with √d_ℓ ≤ τ: the rule that every criterion imitates.
``price``      depths that minimise Σ_t d_{ℓ(t)} + λ·ℓ(t): free depth token by token, monotone depth by dynamic
               programming over the sequence, with the future known. If text is as likely as the model predicts, d is
               the expected loss of an exit, and no rule that knows only d does better: this is *the ceiling of rules
               that know the divergence*. A threshold is not, since it takes the first sufficient layer.

Neither knows the next token. Choosing by its likelihood would save more without meaning, since by chance almost every
token is likelier at some layer than at the end.

τ and λ are set on the judged text: an upper bound, not a promise. Both sides of the comparison have equal charges:
``depth`` is blocks; FLOPs include blocks, attention, lens and head at the exit, and under free depth one K/V fill for
every layer above it, the cost of copying, though states are exact here (``replay_losses_with_fill_cost``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.trace import Trace
from emad_ref.models.geometry import Geometry
from emad_ref.point import EXACT_FREE, EntropyEstimator, OperatingPoint, ScheduleName, full_depth
from emad_ref.record import Floats, Ints
from emad_ref.replay.losses import Losses, losses_of_replays
from emad_ref.replay.replay import (
    ReplayResult,
    TraceReplayer,
    compute_decode_flops_by_sequence,
    iterate_point_replays,
    replay,
)

RISE_LEVELS = (0.001, 0.01, 0.05)  # rises of perplexity at which savings are reported
JUDGED_RISE = 0.01  # the rise that decides whether a model has headroom
WORTHLESS_SAVING = 0.05  # share of full depth's cost; with a lower bound no rule is worth its probes
ORACLE_SETTINGS = 128  # settings, full depth not counted
FINEST_THRESHOLD = 1e-4  # √nats, and nats per block; smaller ones change perplexity by less than 0.001 %
ORACLE_ESTIMATOR = EntropyEstimator("linear")  # without weights, since it is exact and has no reader
FREE_DEPTH: ScheduleName = "free_eager"

OracleName = Literal["threshold", "price"]


def oracle_name(oracle: OracleName, monotone: bool) -> str:
    """E.g. ``oracle, price, free depth``."""
    return f"oracle, {oracle}, {'monotone' if monotone else 'free'} depth"


def oracle_losses(
    trace: Trace,
    geometry: Geometry,
    oracle: OracleName = "threshold",
    *,
    monotone: bool = False,
    probes: Sequence[int] | None = None,
    count: int = ORACLE_SETTINGS,
) -> Losses:
    """Losses of full depth, and of the oracle at ``count`` settings, on ``trace``, which records divergences.

    ``probes``: layers after which tokens may leave; None: every one below the last that the trace has read.

    Raises:
        BadArgument: a trace without divergences; probes that are not ascending layers below the last.
    """
    allowed = tuple(layer for layer in trace.layers_read if layer < trace.layers) if probes is None else tuple(probes)
    at = [probe - 1 for probe in allowed]
    root_divergence = np.sqrt(trace.divergence()[:, at].astype(np.float64))
    if oracle == "threshold":
        settings = space_thresholds(root_divergence, count)
        points = [oracle_divergence_point(trace, float(setting), allowed, monotone) for setting in settings]
        return replay_losses_with_fill_cost(with_oracle_signal(trace), geometry, points)
    settings = np.geomspace(FINEST_THRESHOLD, max(float(root_divergence.max()) ** 2, 2 * FINEST_THRESHOLD), count)
    chosen = _by_price(trace, allowed, monotone)
    full = replace(full_depth(trace.layers), lens=trace.lens)  # charged only for its layers and the emission
    point = full if monotone else replace(full, schedule=FREE_DEPTH)
    named = ((float(price), replace(point, name=f"λ={price:.3g}")) for price in settings)
    return _losses_with_fill_cost(trace, geometry, (_replay_at(trace, chosen(price), each) for price, each in named))


def with_oracle_signal(trace: Trace) -> Trace:
    """The same trace with an exact, free estimate of the signal ``divergence``, by ``ORACLE_ESTIMATOR``.

    Raises:
        BadArgument: a trace without divergences.
    """
    true = np.sqrt(trace.divergence())
    return replace(
        trace,
        estimates={**trace.estimates, ORACLE_ESTIMATOR: true},
        macs_per_row={**trace.macs_per_row, ORACLE_ESTIMATOR: 0},
    )


def oracle_divergence_point(
    trace: Trace, threshold: float, probes: Sequence[int], monotone: bool = False
) -> OperatingPoint:
    """The point that exits at the first probe with √KL ≤ ``threshold``.

    For replays of ``with_oracle_signal(trace)`` only.
    """
    return OperatingPoint(
        f"√KL ≤ {threshold:.3g}",
        "oracle",
        trace.layers,
        trace.layers,
        tuple(probes),
        ((threshold,) * len(probes),),
        "monotone" if monotone else FREE_DEPTH,
        ORACLE_ESTIMATOR,
        "divergence",
        lens=trace.lens,
    )


def space_thresholds(values: NDArray[np.floating], count: int) -> Floats:
    """``count`` ascending thresholds: at even shares of ``values``, and in equal ratios below the lowest share.

    Under a monotone schedule a single confident token decides for all later ones, so small savings are below the lowest
    share.
    """
    coarse = np.quantile(values, np.linspace(0, 1, count - count // 3))
    fine = np.geomspace(FINEST_THRESHOLD, max(float(values.max()), 2 * FINEST_THRESHOLD), count // 3)
    return np.unique(np.concatenate([coarse, fine]))


def replay_losses_with_fill_cost(trace: Trace, geometry: Geometry, points: Iterable[OperatingPoint]) -> Losses:
    """``replay_losses``, full depth first; free depth is charged for copied K and V.

    Losses are those of exact K and V: a bound on those of copied or translated ones.
    """
    return _losses_with_fill_cost(trace, geometry, iterate_point_replays(trace, points))


def _losses_with_fill_cost(trace: Trace, geometry: Geometry, replays: Iterable[ReplayResult]) -> Losses:
    return losses_of_replays(
        trace,
        chain([replay(trace, full_depth(trace.layers))], replays),
        lambda replayed: sequence_flops_with_fill_cost(trace, replayed, geometry),
    )


def sequence_flops_with_fill_cost(trace: Trace, replayed: ReplayResult, geometry: Geometry) -> Floats:
    """[sequences] FLOPs of decode steps; free depth is charged one K/V fill for every layer above an exit."""
    point = replayed.point
    if point.schedule == "monotone":
        return compute_decode_flops_by_sequence(trace, replayed, geometry)
    assert point.schedule in EXACT_FREE, "other schedules are not charged so"
    walked = replace(replayed, point=replace(point, schedule="monotone"))  # blocks up to its own depth only
    fills = trace.token_positions.sum_by_sequence(point.ceiling - replayed.depth)
    return compute_decode_flops_by_sequence(trace, walked, geometry) + fills * geometry.kv_fill_flops()


# ---------------------------------------------------------------- at a price


def _replay_at(trace: Trace, depth: Ints, point: OperatingPoint) -> ReplayResult:
    place = np.arange(len(trace)), depth - 1
    return ReplayResult(point, depth, trace.nll_nats[place].astype(np.float64), trace.top1[place])


def _by_price(trace: Trace, probes: tuple[int, ...], monotone: bool) -> Callable[[float], Ints]:
    """λ → depths int64 [tokens] that minimise Σ d + λ·depth; ties go to the shallowest."""
    depths = np.array([*probes, trace.layers])
    divergence = trace.divergence()[:, depths - 1].astype(np.float64)

    def free(price: float) -> Ints:
        chosen: Ints = depths[np.argmin(divergence + price * depths, axis=1)]
        return chosen

    if not monotone:
        return free
    replayer = TraceReplayer(trace)
    grid = np.zeros((*replayer.shape, len(depths)))  # [longest, sequences, depths]; ended sequences cost nothing
    grid.reshape(-1, len(depths))[replayer.place] = divergence
    running = np.zeros(replayer.shape, dtype=np.bool_)
    running.reshape(-1)[replayer.place] = True

    def falling(price: float) -> Ints:
        chosen: Ints = depths[_cheapest_fall(grid + running[..., None] * price * depths).reshape(-1)[replayer.place]]
        return chosen

    return falling


def _cheapest_fall(cost: Floats) -> NDArray[np.intp]:
    """[longest, sequences] choices that never rise and minimise the total; ``cost`` [longest, sequences, choices].

    least[t, c] = min over choices d ≤ c of cost[t, d] + least[t + 1, d], from the end on; then forward along them.
    """
    longest, sequences, choices = cost.shape
    onward = np.zeros((sequences, choices))
    best = np.zeros(cost.shape, dtype=np.intp)  # the choice at t under the cap c
    for t in reversed(range(longest)):
        total = cost[t] + onward
        onward = np.minimum.accumulate(total, axis=1)
        first = np.where(total == onward, np.arange(choices), 0)  # a new minimum, or one equal to the earlier minimum
        lower = np.concatenate([np.ones((sequences, 1), bool), total[:, 1:] < onward[:, :-1]], axis=1)
        best[t] = np.maximum.accumulate(np.where(lower, first, 0), axis=1)
    chosen = np.zeros((longest, sequences), dtype=np.intp)
    cap, row = np.full(sequences, choices - 1), np.arange(sequences)
    for t in range(longest):
        cap = chosen[t] = best[t, row, cap]
    return chosen
