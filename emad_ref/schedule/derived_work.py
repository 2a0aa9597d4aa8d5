"""Work derived from depths: what decoding runs for each token if sequences are fed one by one, each alone.

EMAD, "Complexity and expected speedup": E[D_t]/L of the blocks, and a readout per probe ℓ ∈ P until the exit. Layer by
layer: the block for tokens that a schedule runs there (``Schedule.ran``), K/V-only passes for those it fills,
a readout where a probe reads, and a head where a token exits. Decoders *count* their executed work; a law holds both
equal (``tests/laws``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import StateTranslators
from emad_ref.record import FILLS, READOUTS, Bools, Floats, Ints, Work
from emad_ref.schedule.schedules import (
    LayerWorkByToken,
    TokenPositions,
    count_reaching_tokens_from_histogram,
    get_point_schedule,
)

FULL_HEAD = READOUTS.index("full")


@dataclass(frozen=True, eq=False)
class ProbeCosts:
    """Costs of probes, by layer.

    ``heads`` bool [kinds, L] readouts of one probe. ``shows`` bool [L]: whether its logits are also an exiting token's
    output, so that no other head runs. ``macs`` int64 [tokens, L] multiply-adds of one, beside a full head's own.
    """

    heads: Bools
    shows: Bools
    macs: Ints


def compute_probe_costs(point: OperatingPoint, tokens: int, ahead: Ints, macs_per_row: int) -> ProbeCosts:
    """Costs of one reading by the point's estimator at each probe; a full one also gives the output.

    ``ahead`` int64 [L] multiply-adds in front of a full head after each layer; ``macs_per_row`` those of other
    readings.
    """
    kind = READOUTS.index(point.estimator.kind)
    heads = np.zeros((len(READOUTS), point.layers), dtype=np.bool_)
    heads[kind] = True
    # the geometry has a full head's own cost
    macs = ahead if kind == FULL_HEAD else np.full(point.layers, macs_per_row)
    return ProbeCosts(heads, np.full(point.layers, kind == FULL_HEAD), np.broadcast_to(macs, (tokens, point.layers)))


@dataclass(frozen=True, eq=False)
class _LayerRange:
    """Work of layers ``below`` + 1 … ``top``, all equal; ``fill_macs`` [layers, tokens] in front of each fill."""

    below: int
    top: int
    ran: LayerWorkByToken
    fill_macs: Ints


@dataclass(frozen=True, eq=False)
class _LayerReadout:
    """Readouts after ``layer``: ``heads`` bool [kinds] of a probe, ``macs`` [tokens] of one, besides a full head's.

    ``probed`` bool [tokens]: tokens that a probe reads here, None without a probe. ``emitted`` bool [tokens]: tokens
    emitted by a separate head, with ``ahead`` multiply-adds a row in front of it.
    """

    layer: int
    heads: Bools
    macs: Ints
    probed: Bools | None
    emitted: Bools
    ahead: int


def derive_work(
    point: OperatingPoint, places: TokenPositions, depth: Ints, histogram: Ints, probed: ProbeCosts, ahead: Ints
) -> Work:
    """Work of single-token steps at ``places`` and ``depth`` [tokens]; a step attends to position + 1 keys.

    ``histogram`` int64 [L + 1]: tokens of each depth.
    Excludes state translators, whose cost per fill depends on the token's exit layer (``derive_token_flops``).
    """
    schedule, work = get_point_schedule(point), Work.none(point.layers)
    work.tokens[:], work.context[:], fills = schedule.counted(places, depth, histogram, point.ceiling)
    if fills is not None:
        work.fills[FILLS.index(schedule.fills)] = fills
    asked = schedule.asked(point, places.index_among_decided_tokens)
    of_asked = histogram if asked.all() else np.bincount(depth[asked], minlength=point.layers + 1)
    probes = np.zeros(point.layers, dtype=np.bool_)
    probes[np.array(point.probes, dtype=np.int64) - 1] = True
    rows, alone = (
        probes * count_reaching_tokens_from_histogram(of_asked),
        histogram[1:] - (probes & probed.shows) * of_asked[1:],
    )
    work.readout_rows[:] = probed.heads * rows
    work.readout_macs[:] = probed.heads * _charged_macs(point, probed.macs, depth, asked, rows)
    work.readout_rows[FULL_HEAD] += alone
    work.readout_macs[FULL_HEAD] += alone * ahead
    return work


def derive_token_flops(
    point: OperatingPoint,
    places: TokenPositions,
    depth: Ints,
    probed: ProbeCosts,
    ahead: Ints,
    geometry: Geometry,
    translators: StateTranslators | None = None,
) -> Floats:
    """FLOPs of each token's steps, float64 [tokens]; their sum is ``flops`` of ``derive_work``."""
    each, values = np.full(len(depth), float(geometry.input_flops())), np.flatnonzero(np.bincount(depth))
    for run in _layer_ranges(point, places, depth, values, translators):
        layers, (keys, fills) = run.top - run.below, run.ran
        each += (keys > 0) * (layers * geometry.block_flops()) + keys * (layers * geometry.attention_flops())
        if fills is not None:
            each += fills * (layers * geometry.kv_fill_flops() + 2 * run.fill_macs.sum(axis=0))
    for read in _layer_readouts(point, places, depth, values, probed, ahead):
        each += read.emitted * (geometry.head_flops() + 2 * read.ahead)
        if read.probed is not None:
            head = int(read.heads[FULL_HEAD]) * geometry.head_flops()
            each += read.probed * (head + 2 * int(read.heads.sum()) * read.macs)
    return each


def _layer_ranges(
    point: OperatingPoint, places: TokenPositions, depth: Ints, values: Ints, translators: StateTranslators | None
) -> Iterator[_LayerRange]:
    """Layer ranges of equal work, from the first layer on, split at the ``values`` of ``depth`` and the ceiling."""
    schedule, nothing = get_point_schedule(point), np.broadcast_to(0, (point.layers, len(depth)))
    tops = sorted({point.ceiling - 1, point.ceiling, point.layers, *values.tolist()} - {0})
    for below, top in itertools.pairwise([0, *tops]):
        ran, macs = schedule.ran(places, depth, top, point.ceiling), nothing[below:top]
        if ran.fills is not None and translators is not None:
            macs = np.stack([translators.macs_per_row_by_exit(layer)[depth - 1] for layer in range(below + 1, top + 1)])
        yield _LayerRange(below, top, ran, macs)


def _layer_readouts(
    point: OperatingPoint, places: TokenPositions, depth: Ints, values: Ints, probes: ProbeCosts, ahead: Ints
) -> Iterator[_LayerReadout]:
    """Readouts from the first layer on: at probes, and at the ``values`` of ``depth``, where tokens exit."""
    asked = get_point_schedule(point).asked(point, places.index_among_decided_tokens)
    small = depth.astype(np.int16)  # comparisons take a third of the time
    for layer in sorted({*point.probes, *values.tolist()}):
        probed, emitted = asked & (small >= layer) if layer in point.probes else None, small == layer
        if probed is not None and probes.shows[layer - 1]:
            emitted &= ~probed
        heads, macs = probes.heads[:, layer - 1], probes.macs[:, layer - 1]
        yield _LayerReadout(layer, heads, macs, probed, emitted, int(ahead[layer - 1]))


def _charged_macs(point: OperatingPoint, macs: Ints, depth: Ints, asked: Bools, rows: Ints) -> Ints:
    """int64 [L] Σ of ``macs`` [tokens, L] over the tokens that each layer's probe reads, ``rows`` int64 [L] of them."""
    charged: Ints = rows * macs[0]
    if macs.strides[0] == 0:  # one number serves all tokens
        return charged
    for layer in point.probes:
        charged[layer - 1] = macs[:, layer - 1].sum(where=asked & (depth >= layer))
    return charged
