"""The loss table: what each operating point costs in quality and saves in FLOPs, from replays of one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.meters.flops import Flops, flops
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.record import Floats, Ints
from emad_ref.replay import Replay, decode_flops, decode_work, replay, replay_all, sums, work_of
from emad_ref.signals import perplexity_of, relative_rise

POSITIONS = ((1, 32), (33, 128), (129, None))  # METHODS, "Conditioning bins"


@dataclass(frozen=True, eq=False)  # holds arrays: a row is itself, not its values
class Loss:
    """One row. Reductions are shares of full-depth FLOPs of the same decode steps; ``net`` charges everything executed.

    ``nll_nats`` [sequences] sums at the point's depths; perplexities are exp(Σ nll / Σ tokens), infinite as soon as a
    pruned vocabulary has lost one next token. ``accuracy``: share of next tokens told right, which compares every rule.
    """

    point: OperatingPoint
    mean_depth: float
    depth_p50: float
    depth_p90: float
    depth_shares: dict[int, float]
    gross_reduction: float
    net_reduction: float
    nll_nats: Floats
    perplexity: float
    perplexity_rise: float
    accuracy: float


def loss_of(trace: Trace, geometry: Geometry, replayed: Replay, reference: Replay, full: Flops) -> Loss:
    """Compare one replay with the full-depth replay of the same trace, which costs ``full``."""
    mine = flops(work_of(trace, replayed), geometry)
    values = np.flatnonzero(replayed.histogram)
    counts, tokens = replayed.histogram[values], len(trace)
    return Loss(
        point=replayed.point,
        mean_depth=int(values @ counts) / tokens,
        depth_p50=_quantile(values, counts, 0.5),
        depth_p90=_quantile(values, counts, 0.9),
        depth_shares={int(v): float(c / tokens) for v, c in zip(values, counts, strict=True)},
        gross_reduction=1 - mine.gross / full.gross,
        net_reduction=1 - mine.total / full.total,
        nll_nats=sums(trace, replayed.nll_nats),
        perplexity=perplexity_of(replayed.mean_nll),
        perplexity_rise=relative_rise(replayed.mean_nll - reference.mean_nll),
        accuracy=np.count_nonzero(replayed.right(trace)) / tokens,
    )


def _quantile(values: Ints, counts: Ints, share: float) -> float:
    """``np.quantile`` of ascending ``values``, each as often as ``counts`` says: nothing is sorted."""
    place = share * (counts.sum() - 1)
    around = np.searchsorted(counts.cumsum(), [np.floor(place), np.ceil(place)], side="right")
    low, high = values[around].tolist()
    return float(low + (high - low) * (place % 1))


def loss_table(trace: Trace, geometry: Geometry, points: Iterable[OperatingPoint]) -> list[Loss]:
    """One row per point, in order."""
    reference = replay(trace, full_depth(trace.layers))
    full = full_flops(trace, geometry)
    return [loss_of(trace, geometry, replayed, reference, full) for replayed in replay_all(trace, points)]


def net_saving(trace: Trace, geometry: Geometry, replayed: Replay, full: Flops) -> float:
    """Net share of ``full``, the FLOPs of the same decode steps at full depth, that a replay saves."""
    return 1 - flops(work_of(trace, replayed), geometry).total / full.total


def full_flops(trace: Trace, geometry: Geometry) -> Flops:
    """FLOPs of a trace's decode steps at full depth."""
    reference = full_depth(trace.layers)
    return flops(decode_work(trace, np.full(len(trace), trace.layers), reference), geometry)


@dataclass(frozen=True, eq=False)
class Columns:
    """What points lost and cost in each sequence of a trace; float64 [sequences, points], sums over its tokens.

    ``wrong``: next tokens told wrong. ``depth``: layers run.
    """

    nll_nats: Floats
    wrong: Floats
    flops: Floats
    depth: Floats


def columns(trace: Trace, geometry: Geometry, points: Iterable[OperatingPoint]) -> Columns:
    """A column per point, in order.

    Raises:
        BadArgument: no point.
    """
    return columns_of(trace, replay_all(trace, points), lambda replayed: decode_flops(trace, replayed, geometry))


def columns_of(trace: Trace, replays: Iterable[Replay], spent: Callable[[Replay], Floats]) -> Columns:
    """A column per replay, in order; ``spent``: its FLOPs [sequences].

    Raises:
        BadArgument: no replay.
    """
    each = [
        (
            sums(trace, replayed.nll_nats),
            sums(trace, ~replayed.right(trace)),
            spent(replayed),
            sums(trace, replayed.depth),
        )
        for replayed in replays
    ]
    if not each:
        raise BadArgument("points", [], "at least one point")
    return Columns(*(np.stack(column, axis=1) for column in zip(*each, strict=True)))


def rises(found: Columns, tokens: Floats) -> Floats:
    """[points] relative rise of perplexity over the first point, on sequences of ``tokens`` [sequences] each."""
    nats = found.nll_nats
    rise = (nats - nats[:, :1]).sum(axis=0) / tokens.sum()
    return np.array([relative_rise(float(each)) for each in rise])


def tokens_before(trace: Trace, depth: Ints, layer: int) -> Floats:
    """[sequences] decided tokens before the first at ``depth`` [tokens] ≤ ``layer``; inf where none is.

    With τ = mean entropy about half of all tokens fire at the first probe, and under the monotone schedule depth never
    comes back: how soon it is there says whether a point adapts or has collapsed.
    """
    return np.minimum.reduceat(np.where(depth <= layer, trace.places.decided, np.inf), trace.starts[:-1])


def depth_by_position(trace: Trace, depth: Ints) -> dict[str, float]:
    """Mean ``depth`` [tokens] in each of ``POSITIONS`` (counted from 1) that holds tokens, e.g. ``{"1–32": 7.5}``."""
    position = trace.position + 1
    means = {}
    for first, last in POSITIONS:
        inside = (position >= first) & (True if last is None else position <= last)
        if inside.any():
            means[f"{first}+" if last is None else f"{first}–{last}"] = float(depth[inside].mean())
    return means
