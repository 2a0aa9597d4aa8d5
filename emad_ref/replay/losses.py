"""Losses and costs of operating points: from replays of one trace, or from decoding if only decoding is exact.

Loss tables compare points on a trace, and a point is chosen from them (EMAD, "Select margin m on a small validation
set"). Under state copying the states of later tokens change with every exit, so no trace gives a point's loss. Then the
text is decoded: layer by layer for points with copied K/V, else token by token in batches. If replay is exact both give
the same columns (a law). Each row of a batch is charged the work of a session of that row alone (a law): derived from
its depths, or as counted under a confidence rule, whose readouts depend on the text.

Decode steps are charged: the last prompt position and all after it. An encoder's run belongs to its prompt;
cross-attention of decode steps, and the K/V of a source that they need, are charged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from tqdm import tqdm

from emad_ref.calibration.trace import Trace
from emad_ref.calibration.windows import TokenSequence, iterate_batches
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.teacher_forcing import BATCH_ROWS, TeacherForcedText, teacher_force_texts
from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import Flops, flops
from emad_ref.models.geometry import Geometry
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.probes.estimators import make_entropy_reader
from emad_ref.probes.tuned_lens import get_point_lens, get_point_translators, lens_macs_by_layer
from emad_ref.record import Floats, Ints
from emad_ref.replay.replay import (
    ReplayResult,
    compute_decode_flops_by_sequence,
    compute_decode_work,
    compute_replayed_decode_work,
    iterate_point_replays,
    replay,
    sum_by_sequence,
)
from emad_ref.schedule.derived_work import compute_probe_costs, derive_sequence_flops
from emad_ref.schedule.schedules import TokenPositions, get_point_schedule
from emad_ref.signals import perplexity_from_nats, perplexity_rise_from_nats

POSITIONS = ((1, 32), (33, 128), (129, None))


@dataclass(frozen=True, eq=False)  # holds arrays: rows compare by identity
class PointLoss:
    """One row. Reductions are shares of full-depth FLOPs of the same decode steps; ``net`` charges all executed work.

    ``nll_nats`` [sequences] sums at the point's depths; perplexities are exp(Σ nll / Σ tokens), infinite as soon as a
    pruned vocabulary has lost one next token. ``accuracy``: share of correctly predicted next tokens, which compares
    every rule.
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


def compute_point_loss_from_replay(
    trace: Trace, geometry: Geometry, replayed: ReplayResult, reference: ReplayResult, full: Flops
) -> PointLoss:
    """Compare one replay with the full-depth replay of the same trace, which costs ``full``."""
    mine = flops(compute_replayed_decode_work(trace, replayed), geometry)
    values = np.flatnonzero(replayed.depth_histogram)
    counts, tokens = replayed.depth_histogram[values], len(trace)
    return PointLoss(
        point=replayed.point,
        mean_depth=int(values @ counts) / tokens,
        depth_p50=_weighted_quantile(values, counts, 0.5),
        depth_p90=_weighted_quantile(values, counts, 0.9),
        depth_shares={int(v): float(c / tokens) for v, c in zip(values, counts, strict=True)},
        gross_reduction=1 - mine.blocks_and_attention / full.blocks_and_attention,
        net_reduction=1 - mine.total / full.total,
        nll_nats=sum_by_sequence(trace, replayed.nll_nats),
        perplexity=perplexity_from_nats(replayed.mean_nll),
        perplexity_rise=perplexity_rise_from_nats(replayed.mean_nll - reference.mean_nll),
        accuracy=np.count_nonzero(replayed.is_top1_correct(trace)) / tokens,
    )


def _weighted_quantile(values: Ints, counts: Ints, share: float) -> float:
    """``np.quantile`` of ascending ``values`` with multiplicities ``counts``, without sorting."""
    place = share * (counts.sum() - 1)
    around = np.searchsorted(counts.cumsum(), [np.floor(place), np.ceil(place)], side="right")
    low, high = values[around].tolist()
    return float(low + (high - low) * (place % 1))


def point_losses(trace: Trace, geometry: Geometry, points: Iterable[OperatingPoint]) -> list[PointLoss]:
    """One row per point, in order."""
    reference = replay(trace, full_depth(trace.layers))
    full = full_depth_flops(trace, geometry)
    return [
        compute_point_loss_from_replay(trace, geometry, replayed, reference, full)
        for replayed in iterate_point_replays(trace, points)
    ]


def net_saving(trace: Trace, geometry: Geometry, replayed: ReplayResult, full: Flops) -> float:
    """Net share of ``full``, the FLOPs of the same decode steps at full depth, that a replay saves."""
    return 1 - flops(compute_replayed_decode_work(trace, replayed), geometry).total / full.total


def full_depth_flops(trace: Trace, geometry: Geometry) -> Flops:
    """FLOPs of a trace's decode steps at full depth."""
    reference = full_depth(trace.layers)
    return flops(compute_decode_work(trace, np.full(len(trace), trace.layers), reference), geometry)


@dataclass(frozen=True, eq=False)
class PointColumnsBySequence:
    """Losses and costs of points in each sequence of a trace; float64 [sequences, points], sums over its tokens.

    ``wrong``: wrongly predicted next tokens. ``depth``: layers run.
    """

    nll_nats: Floats
    wrong: Floats
    flops: Floats
    depth: Floats


def replay_points_to_columns(
    trace: Trace, geometry: Geometry, points: Iterable[OperatingPoint]
) -> PointColumnsBySequence:
    """A column per point, in order.

    Raises:
        BadArgument: no point.
    """
    return columns_from_replays(
        trace,
        iterate_point_replays(trace, points),
        lambda replayed: compute_decode_flops_by_sequence(trace, replayed, geometry),
    )


def columns_from_replays(
    trace: Trace, replays: Iterable[ReplayResult], spent: Callable[[ReplayResult], Floats]
) -> PointColumnsBySequence:
    """A column per replay, in order; ``spent``: its FLOPs [sequences].

    Raises:
        BadArgument: no replay.
    """
    each = [
        (
            sum_by_sequence(trace, replayed.nll_nats),
            sum_by_sequence(trace, ~replayed.is_top1_correct(trace)),
            spent(replayed),
            sum_by_sequence(trace, replayed.depth),
        )
        for replayed in replays
    ]
    if not each:
        raise BadArgument("points", [], "at least one point")
    return PointColumnsBySequence(*(np.stack(column, axis=1) for column in zip(*each, strict=True)))


def perplexity_rises(columns: PointColumnsBySequence, tokens: Floats) -> Floats:
    """[points] relative rise of perplexity over the first point, on sequences of ``tokens`` [sequences] each."""
    nats = columns.nll_nats
    rise = (nats - nats[:, :1]).sum(axis=0) / tokens.sum()
    return np.array([perplexity_rise_from_nats(float(each)) for each in rise])


def tokens_before_depth_by_sequence(trace: Trace, depth: Ints, layer: int) -> Floats:
    """[sequences] decided tokens before the first at ``depth`` [tokens] ≤ ``layer``; inf without one.

    With τ = mean entropy about half of all tokens fire at the first probe, and under the monotone schedule depth never
    returns: this number shows whether a point adapts or has collapsed.
    """
    return np.minimum.reduceat(
        np.where(depth <= layer, trace.token_positions.index_among_decided_tokens, np.inf), trace.starts[:-1]
    )


def depth_by_position(trace: Trace, depth: Ints) -> dict[str, float]:
    """Mean ``depth`` [tokens] in each of ``POSITIONS`` (counted from 1) with tokens, e.g. ``{"1–32": 7.5}``."""
    position = trace.position + 1
    means = {}
    for first, last in POSITIONS:
        inside = (position >= first) & (True if last is None else position <= last)
        if inside.any():
            means[f"{first}+" if last is None else f"{first}–{last}"] = float(depth[inside].mean())
    return means


MAX_PERPLEXITY_POINTS = 0.1  # the paper's bound
MAX_RELATIVE_RISE = 0.01  # an additional bound, since at perplexity 1.4 the paper's 0.1 alone would be 7 %
MAX_ACCURACY_DROP = 0.005  # the paper's bound on EM


def is_within_bounds(row: PointLoss, reference_perplexity: float) -> bool:
    """Validation drop ≤ min(0.1 perplexity points, 1 % relative)."""
    drop = row.perplexity - reference_perplexity
    return drop <= MAX_PERPLEXITY_POINTS and row.perplexity_rise <= MAX_RELATIVE_RISE


def cheapest_within_bounds(
    table: Sequence[PointLoss],
    reference_perplexity: float,
    accuracy_drops: Callable[[OperatingPoint], Mapping[str, float]] | None = None,
) -> PointLoss | None:
    """The row of smallest mean depth whose validation drop is within bounds; None without one.

    Args:
        accuracy_drops: point → validation accuracy lost by each task that counts there, fractions, each bound by 0.5 %:
            a mean would let one task pay for another. Called only for points within the bounds of perplexity, cheapest
            first. None: perplexity alone decides.
    """
    for row in sorted(table, key=lambda row: row.mean_depth):
        if not is_within_bounds(row, reference_perplexity):
            continue
        drops = {} if accuracy_drops is None else accuracy_drops(row.point)
        if all(drop <= MAX_ACCURACY_DROP for drop in drops.values()):
            return row
    return None


def best_at_equal_flops(table: Sequence[PointLoss], net_reduction: float) -> PointLoss | None:
    """The row of lowest perplexity that saves at least ``net_reduction`` (a share of full-depth FLOPs), or None.

    For tables of single points; claims compare at exactly the same saving.
    """
    affordable = [row for row in table if row.net_reduction >= net_reduction]
    return min(affordable, key=lambda row: row.perplexity, default=None)


def decoded_columns(
    stepper: Stepper,
    geometry: Geometry,
    sequences: Sequence[TokenSequence],
    points: Iterable[OperatingPoint],
    *,
    rows: int = BATCH_ROWS,
    progress: str | None = None,
) -> PointColumnsBySequence:
    """Losses and costs of operating points, by teacher forcing at each point (``decoding.teacher_forcing``).

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    geometry : Geometry
        Sizes of that model, for FLOPs.
    sequences : sequence of TokenSequence
        The text; columns keep its order.
    points : sequence of OperatingPoint
        One column each, in order.
    rows : int
        Largest batch.
    progress : str or None
        Name of the progress bar; None shows none.

    Returns
    -------
    PointColumnsBySequence
        float64 [sequences, points]: NLL in nats, wrong tokens, FLOPs, layers run; sums over the decided tokens.

    Raises
    ------
    BadArgument
        No point; no sequence, or one without a decided token; fewer than one row; a point or text that the decoder
        refuses.
    NotFinite
        Logits hold NaN or +inf.
    """
    requested = list(points)
    if not requested:
        raise BadArgument("points", [], "at least one point")
    if rows < 1:
        raise BadArgument("rows", rows, "at least 1")
    if not list(iterate_batches(sequences)):
        raise BadArgument("sequences", [], "at least one sequence")
    columns = [
        columns_from_teacher_forced_texts(
            stepper,
            geometry,
            sequences,
            point,
            teacher_force_at_point(stepper, sequences, point, rows=rows, progress=progress),
        )
        for point in requested
    ]
    return PointColumnsBySequence(
        *(np.hstack([getattr(each, field.name) for each in columns]) for field in fields(PointColumnsBySequence))
    )


def teacher_force_at_point(
    stepper: Stepper,
    sequences: Sequence[TokenSequence],
    point: OperatingPoint,
    *,
    rows: int = BATCH_ROWS,
    progress: str | None = None,
) -> list[TeacherForcedText]:
    """``sequences`` fed to the reference decoder at ``point``; arguments and exceptions as of ``decoded_columns``."""
    decoder = WalkedDecoder(stepper, point, max_rows=1 if point.confidence is not None else rows)
    total = sum(sequence.n_decided for sequence in sequences)
    with tqdm(desc=progress, disable=progress is None, total=total, unit="tok", unit_scale=True) as bar:
        return teacher_force_texts(decoder, sequences, bar.update)


def columns_from_teacher_forced_texts(
    stepper: Stepper,
    geometry: Geometry,
    sequences: Sequence[TokenSequence],
    point: OperatingPoint,
    texts: Sequence[TeacherForcedText],
) -> PointColumnsBySequence:
    """Columns [sequences, 1] of ``texts``, the result of ``teacher_force_at_point`` on ``sequences`` at ``point``."""
    depths = [text.depth for text in texts]
    if point.confidence is None:
        cost = _derived_flops(stepper, geometry, sequences, point, depths)
    else:
        cost = np.array([float(flops(text.work, geometry).total) for text in texts if text.work is not None])
    nll_nats, wrong = (np.array([getattr(text, name).sum() for text in texts], float) for name in ("nll_nats", "wrong"))
    depth = np.array([each.sum() for each in depths], dtype=np.float64)
    return PointColumnsBySequence(*(each[:, None] for each in (nll_nats, wrong, cost, depth)))


def _derived_flops(
    stepper: Stepper, geometry: Geometry, batch: Sequence[TokenSequence], point: OperatingPoint, depths: Sequence[Ints]
) -> Floats:
    """[rows] FLOPs derived from these depths, each row decoded alone."""
    starts = np.concatenate([[0], np.cumsum([len(row) for row in depths])])
    position = np.concatenate(
        [text.first_decided + np.arange(len(row)) for text, row in zip(batch, depths, strict=True)]
    )
    positions, depth = TokenPositions(position, starts), np.concatenate(depths)
    lens_macs = lens_macs_by_layer(get_point_lens(stepper, point), point.layers)
    reading = (
        0
        if point.estimator.kind == "full"
        else make_entropy_reader(stepper, point.estimator, point.probes).macs_per_row
    )
    costs = compute_probe_costs(point, len(depth), lens_macs, reading)
    each = derive_sequence_flops(
        point, positions, depth, costs, lens_macs, geometry, get_point_translators(stepper, point)
    )
    return each + positions.sum_by_sequence(_cross_flops(geometry, batch, point, positions, depth))


def _cross_flops(
    geometry: Geometry, batch: Sequence[TokenSequence], point: OperatingPoint, positions: TokenPositions, depth: Ints
) -> Floats:
    """[tokens] FLOPs of cross-attention, and of a source's K and V when a row's first token in a layer needs them.

    A prompt of more than its last position has computed them everywhere.
    """
    each = np.zeros(len(depth))
    if all(text.source is None for text in batch):
        return each
    sequence = np.repeat(np.arange(len(batch)), np.diff(positions.starts))
    widths = np.array([len(text.source) if text.source is not None else 0 for text in batch])
    unread = np.array([text.first_decided == 0 for text in batch])
    for layer in range(1, point.ceiling + 1):
        ran_block = get_point_schedule(point).layer_work(positions, depth, layer, point.ceiling).keys > 0
        each += ran_block * widths[sequence] * geometry.attention_flops()
        first = np.flatnonzero(ran_block)[np.unique(sequence[ran_block], return_index=True)[1]]
        each[first] += (unread * widths)[sequence[first]] * geometry.cross_fill_flops()
    return each
