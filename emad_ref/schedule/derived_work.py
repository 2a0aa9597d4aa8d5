"""Work that decoding executes at given depths, if each sequence is decoded alone, token by token.

EMAD, "Complexity and expected speedup": E[D_t]/L of the blocks, and a readout per probe ℓ ∈ P until the exit. Layer by
layer: the block for tokens that a schedule runs there (``Schedule.layer_work``), K/V-only passes for those it fills,
a readout where a probe reads, and a head where a token exits. Decoders *count* their executed work; a law holds both
equal (``tests/laws``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import StateTranslators
from emad_ref.record import FILLS, READOUTS, Bools, Floats, Ints, Work
from emad_ref.schedule.schedules import (
    LayerWorkByToken,
    TokenPositions,
    count_reaching_tokens_from_histogram,
    deferred_layer_counts,
    deferred_sums_by_sequence,
    get_point_schedule,
)

FULL_HEAD = READOUTS.index("full")


@dataclass(frozen=True, eq=False)
class ProbeCosts:
    """Costs of probes, by layer.

    ``heads`` bool [kinds, L] readouts of one probe. ``shows`` bool [L]: whether its logits are also an exiting token's
    output, so that no other head runs. ``macs`` int64 [tokens, L] multiply-adds of each token's readout; a full head's
    own are not among them.
    """

    heads: Bools
    shows: Bools
    macs: Ints


def compute_probe_costs(point: OperatingPoint, tokens: int, lens_macs: Ints, macs_per_row: int) -> ProbeCosts:
    """Costs of one reading by the point's estimator at each probe; a full one also gives the output.

    ``lens_macs`` int64 [L]: multiply-adds of a row's lens in front of a full head after each layer; ``macs_per_row``:
    those of another estimator's reading.
    """
    kind = READOUTS.index(point.estimator.kind)
    heads = np.zeros((len(READOUTS), point.layers), dtype=np.bool_)
    heads[kind] = True
    # the geometry has a full head's own cost
    macs = lens_macs if kind == FULL_HEAD else np.full(point.layers, macs_per_row)
    return ProbeCosts(heads, np.full(point.layers, kind == FULL_HEAD), np.broadcast_to(macs, (tokens, point.layers)))


@dataclass(frozen=True, eq=False)
class _LayerRange:
    """Work of layers ``below`` + 1 … ``top``, all equal; ``fill_macs`` [layers, tokens] in front of each fill."""

    below: int
    top: int
    layer_work: LayerWorkByToken
    fill_macs: Ints


@dataclass(frozen=True, eq=False)
class _LayerReadout:
    """Readouts after ``layer``.

    ``heads`` bool [kinds]: the readout of a probe. ``macs`` [tokens]: multiply-adds of each token's probe readout; a
    full head's own are not among them. ``probed`` bool [tokens]: tokens that a probe reads here, None without a probe.
    ``emitted`` bool [tokens]: tokens emitted by a separate head. ``lens_macs``: multiply-adds of a row's lens in front
    of it.
    """

    layer: int
    heads: Bools
    macs: Ints
    probed: Bools | None
    emitted: Bools
    lens_macs: int


def derive_work(
    point: OperatingPoint, positions: TokenPositions, depth: Ints, histogram: Ints, costs: ProbeCosts, lens_macs: Ints
) -> Work:
    """Work of single-token steps at ``positions`` and ``depth`` [tokens]; a step attends to position + 1 keys.

    ``histogram`` int64 [L + 1]: tokens of each depth. ``lens_macs`` int64 [L]: multiply-adds of a row's lens in front
    of a head after each layer.
    Excludes state translators, whose cost per fill depends on the token's exit layer (``derive_sequence_flops``).
    """
    schedule, work = get_point_schedule(point), Work.none(point.layers)
    work.tokens[:], work.context[:], fills = schedule.layer_work_totals(positions, depth, histogram, point.ceiling)
    if fills is not None:
        work.fills[FILLS.index(schedule.fills)] = fills
    asked = schedule.reads_rule_at(point, positions.index_among_decided_tokens)
    of_asked = histogram if asked.all() else np.bincount(depth[asked], minlength=point.layers + 1)
    probes = np.zeros(point.layers, dtype=np.bool_)
    probes[np.array(point.probes, dtype=np.int64) - 1] = True
    rows, alone = (
        probes * count_reaching_tokens_from_histogram(of_asked),
        histogram[1:] - (probes & costs.shows) * of_asked[1:],
    )
    work.readout_rows[:] = costs.heads * rows
    work.readout_macs[:] = costs.heads * _charged_macs(point, costs.macs, depth, asked, rows)
    work.readout_rows[FULL_HEAD] += alone
    work.readout_macs[FULL_HEAD] += alone * lens_macs
    return work


def derive_sequence_flops(
    point: OperatingPoint,
    positions: TokenPositions,
    depth: Ints,
    costs: ProbeCosts,
    lens_macs: Ints,
    geometry: Geometry,
    translators: StateTranslators | None = None,
) -> Floats:
    """FLOPs of each sequence's steps, float64 [sequences]; their sum is ``flops`` of ``derive_work``."""
    schedule, layers = get_point_schedule(point), point.layers
    asked = schedule.reads_rule_at(point, positions.index_among_decided_tokens)
    every_depth = np.tile(np.arange(1, layers + 1), 2)
    if costs.macs.strides[0]:
        read = _readout_flops(point, depth, asked, costs, lens_macs, geometry)
    else:  # one row of costs serves all tokens
        both, one = np.repeat([True, False], layers), np.broadcast_to(costs.macs[0], (2 * layers, layers))
        by_depth = _readout_flops(point, every_depth, both, replace(costs, macs=one), lens_macs, geometry)
        read = by_depth.take(depth - 1 if asked.all() else depth - 1 + layers * ~asked)
    if schedule.layer_work is deferred_layer_counts:  # a token runs layers for those that wait before it
        return positions.sum_by_sequence(read) + _deferred_block_flops(point, positions, depth, geometry)
    # by a token's own depth, and linear in its position
    alone = TokenPositions(np.repeat([0, 1], layers), np.arange(2 * layers + 1))
    start, second = np.split(_block_flops(point, alone, every_depth, geometry, translators), 2)
    blocks = start.take(depth - 1) + positions.position * (second - start).take(depth - 1)
    return positions.sum_by_sequence(read + blocks)


def _deferred_block_flops(point: OperatingPoint, positions: TokenPositions, depth: Ints, geometry: Geometry) -> Floats:
    """float64 [sequences] FLOPs of inputs, blocks and attention if stopped tokens wait for a deeper one."""
    each = np.diff(positions.starts) * float(geometry.input_flops())
    tops = np.flatnonzero(np.bincount(depth, minlength=2))
    for below, top in itertools.pairwise([0, *tops.tolist()]):
        tokens, context = deferred_sums_by_sequence(positions, depth, top)
        each += (top - below) * (tokens * geometry.block_flops() + context * geometry.attention_flops())
    return each


def _block_flops(
    point: OperatingPoint,
    positions: TokenPositions,
    depth: Ints,
    geometry: Geometry,
    translators: StateTranslators | None,
) -> Floats:
    """float64 [tokens] FLOPs of inputs, blocks, attention and K/V fills."""
    each, values = np.full(len(depth), float(geometry.input_flops())), np.flatnonzero(np.bincount(depth))
    for run in _layer_ranges(point, positions, depth, values, translators):
        layers, (keys, fills) = run.top - run.below, run.layer_work
        each += (keys > 0) * (layers * geometry.block_flops()) + keys * (layers * geometry.attention_flops())
        if fills is not None:
            each += fills * (layers * geometry.kv_fill_flops() + 2 * run.fill_macs.sum(axis=0))
    return each


def _readout_flops(
    point: OperatingPoint, depth: Ints, asked: Bools, costs: ProbeCosts, lens_macs: Ints, geometry: Geometry
) -> Floats:
    """float64 [tokens] FLOPs of probes and heads; ``asked`` bool [tokens]: whether probes read the token."""
    each, values = np.zeros(len(depth)), np.flatnonzero(np.bincount(depth))
    for read in _layer_readouts(point, depth, asked, values, costs, lens_macs):
        each += read.emitted * (geometry.head_flops() + 2 * read.lens_macs)
        if read.probed is not None:
            head = int(read.heads[FULL_HEAD]) * geometry.head_flops()
            each += read.probed * (head + 2 * int(read.heads.sum()) * read.macs)
    return each


def _layer_ranges(
    point: OperatingPoint, positions: TokenPositions, depth: Ints, values: Ints, translators: StateTranslators | None
) -> Iterator[_LayerRange]:
    """Layer ranges of equal work, from the first layer on, split at the ``values`` of ``depth`` and the ceiling."""
    schedule, nothing = get_point_schedule(point), np.broadcast_to(0, (point.layers, len(depth)))
    tops = sorted({point.ceiling - 1, point.ceiling, point.layers, *values.tolist()} - {0})
    for below, top in itertools.pairwise([0, *tops]):
        work, macs = schedule.layer_work(positions, depth, top, point.ceiling), nothing[below:top]
        if work.fills is not None and translators is not None:
            macs = np.stack([translators.macs_per_row_by_exit(layer)[depth - 1] for layer in range(below + 1, top + 1)])
        yield _LayerRange(below, top, work, macs)


def _layer_readouts(
    point: OperatingPoint, depth: Ints, asked: Bools, values: Ints, costs: ProbeCosts, lens_macs: Ints
) -> Iterator[_LayerReadout]:
    """Readouts from the first layer on: at probes, and at the ``values`` of ``depth``, where tokens exit."""
    small = depth.astype(np.int16)  # comparisons take a third of the time
    for layer in sorted({*point.probes, *values.tolist()}):
        probed, emitted = asked & (small >= layer) if layer in point.probes else None, small == layer
        if probed is not None and costs.shows[layer - 1]:
            emitted &= ~probed
        heads, macs = costs.heads[:, layer - 1], costs.macs[:, layer - 1]
        yield _LayerReadout(layer, heads, macs, probed, emitted, int(lens_macs[layer - 1]))


def _charged_macs(point: OperatingPoint, macs: Ints, depth: Ints, asked: Bools, rows: Ints) -> Ints:
    """int64 [L] Σ of ``macs`` [tokens, L] over the tokens that each layer's probe reads, ``rows`` int64 [L] of them."""
    charged: Ints = rows * macs[0]
    if macs.strides[0] == 0:  # one number serves all tokens
        return charged
    for layer in point.probes:
        charged[layer - 1] = macs[:, layer - 1].sum(where=asked & (depth >= layer))
    return charged
