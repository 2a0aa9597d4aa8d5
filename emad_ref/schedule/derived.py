"""Work that depths imply: what decoding runs for each token of sequences that are fed one by one, each alone.

Layer by layer: the block for tokens that a schedule runs there (``Schedule.ran``), K/V-only passes for those it fills,
a readout where a probe is asked, and a head where a token leaves. Decoders *count* what they execute; that both are
equal is a law (``tests/laws``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.readout.states import StateTranslators
from emad_ref.record import FILLS, READOUTS, Bools, Floats, Ints, Work
from emad_ref.schedule.interface import Places, Ran, ran_once
from emad_ref.schedule.table import schedule_of

FULL = READOUTS.index("full")


@dataclass(frozen=True, eq=False)
class Probed:
    """What probes run, by layer.

    ``heads`` bool [kinds, L] readouts of one probe. ``shows`` bool [L]: whether one shows what a token that leaves
    there emits, so that no other head runs. ``macs`` int64 [tokens, L] multiply-adds of one, beside a full head's own.
    """

    heads: Bools
    shows: Bools
    macs: Ints


def probed_by(point: OperatingPoint, tokens: int, ahead: Ints, macs_per_row: int) -> Probed:
    """One reading by the point's estimator at each probe, of which a full one shows what is emitted.

    ``ahead`` int64 [L] multiply-adds in front of a full head after each layer; ``macs_per_row`` those of any other
    reading.
    """
    kind = READOUTS.index(point.estimator.kind)
    heads = np.zeros((len(READOUTS), point.layers), dtype=np.bool_)
    heads[kind] = True
    # a full head's own cost stands in the geometry
    macs = ahead if kind == FULL else np.full(point.layers, macs_per_row)
    return Probed(heads, np.full(point.layers, kind == FULL), np.broadcast_to(macs, (tokens, point.layers)))


@dataclass(frozen=True, eq=False)
class _Run:
    """What layers ``below`` + 1 … ``top`` run, all alike.

    ``kind``: which of ``FILLS`` their fills are, with ``fill_macs`` [layers, tokens] in front of each.
    """

    below: int
    top: int
    ran: Ran
    kind: int
    fill_macs: Ints


@dataclass(frozen=True, eq=False)
class _Read:
    """What is read after ``layer``: ``heads`` bool [kinds] of a probe, ``macs`` [tokens] of one, beside a full head's.

    ``probed``, ``emitted`` bool [tokens]: who is probed here, None where no probe is, and whose token comes from a head
    of its own, with ``ahead`` multiply-adds a row in front of it.
    """

    layer: int
    heads: Bools
    macs: Ints
    probed: Bools | None
    emitted: Bools
    ahead: int


def work_at(
    point: OperatingPoint,
    places: Places,
    depth: Ints,
    probed: Probed,
    ahead: Ints,
    translators: StateTranslators | None = None,
) -> Work:
    """Work of single-token steps at ``places`` and ``depth`` [tokens]; a step attends to position + 1 keys.

    ``translators``: those that the point names.
    """
    work, every = Work.none(point.layers), np.bincount(depth, minlength=point.layers + 1)
    values = np.flatnonzero(every)
    if schedule_of(point).ran is ran_once:  # then how many tokens have each depth says it all
        keys_of_each = np.bincount(depth, places.keys, minlength=point.layers + 1)  # floats: exact below 2⁵³
        work.tokens[:], work.context[:] = _reaching(every), _reaching(keys_of_each)
    else:
        for run in _runs(point, places, depth, values, translators):
            layers, (keys, fills) = slice(run.below, run.top), run.ran
            work.tokens[layers], work.context[layers] = np.count_nonzero(keys), keys.sum()
            if fills is not None:
                work.fills[run.kind, layers] = np.count_nonzero(fills)
                work.fill_macs[layers] = run.fill_macs.sum(axis=1, where=fills)
    for read in _reads(point, places, depth, values, probed, ahead):
        at = read.layer - 1
        if read.probed is not None:
            work.readout_rows[read.heads, at] = np.count_nonzero(read.probed)
            work.readout_macs[read.heads, at] = _charged(read.macs, read.probed)
        alone = int(np.count_nonzero(read.emitted))
        work.readout_rows[FULL, at] += alone
        work.readout_macs[FULL, at] += alone * read.ahead
    return work


def flops_at(
    point: OperatingPoint,
    places: Places,
    depth: Ints,
    probed: Probed,
    ahead: Ints,
    geometry: Geometry,
    translators: StateTranslators | None = None,
) -> Floats:
    """float64 [tokens] FLOPs of each token's steps: what ``flops`` of ``work_at`` has in all."""
    each, values = np.full(len(depth), float(geometry.input_flops())), np.flatnonzero(np.bincount(depth))
    for run in _runs(point, places, depth, values, translators):
        layers, (keys, fills) = run.top - run.below, run.ran
        each += (keys > 0) * (layers * geometry.block_flops()) + keys * (layers * geometry.attention_flops())
        if fills is not None:
            each += fills * (layers * geometry.kv_fill_flops() + 2 * run.fill_macs.sum(axis=0))
    for read in _reads(point, places, depth, values, probed, ahead):
        each += read.emitted * (geometry.head_flops() + 2 * read.ahead)
        if read.probed is not None:
            head = int(read.heads[FULL]) * geometry.head_flops()
            each += read.probed * (head + 2 * int(read.heads.sum()) * read.macs)
    return each


def _reaching(of_each: Ints | Floats) -> Ints:
    """int64 [layers] Σ over the depths that reach each layer of ``of_each`` [layers + 1], what each depth has."""
    reaching: Ints = of_each[:0:-1].cumsum()[::-1].astype(np.int64)
    return reaching


def _runs(
    point: OperatingPoint, places: Places, depth: Ints, values: Ints, translators: StateTranslators | None
) -> Iterator[_Run]:
    """From the first layer on; between two ``values`` of ``depth``, on one side of the ceiling, all run the same."""
    schedule = schedule_of(point)
    kind, nothing = FILLS.index(schedule.fills), np.broadcast_to(0, (point.layers, len(depth)))
    tops = sorted({point.ceiling - 1, point.ceiling, point.layers, *values.tolist()} - {0})
    for below, top in itertools.pairwise([0, *tops]):
        ran, macs = schedule.ran(places, depth, top, point.ceiling), nothing[below:top]
        if ran.fills is not None and translators is not None:
            macs = np.stack([translators.macs_below(layer)[depth - 1] for layer in range(below + 1, top + 1)])
        yield _Run(below, top, ran, kind, macs)


def _reads(
    point: OperatingPoint, places: Places, depth: Ints, values: Ints, probes: Probed, ahead: Ints
) -> Iterator[_Read]:
    """From the first layer on, where a probe is and where a token leaves: at the ``values`` of ``depth``."""
    asked = schedule_of(point).asked(point, places.decided)
    small = depth.astype(np.int16)  # compared in a third of the time
    for layer in sorted({*point.probes, *values.tolist()}):
        probed, emitted = asked & (small >= layer) if layer in point.probes else None, small == layer
        if probed is not None and probes.shows[layer - 1]:
            emitted &= ~probed
        heads, macs = probes.heads[:, layer - 1], probes.macs[:, layer - 1]
        yield _Read(layer, heads, macs, probed, emitted, int(ahead[layer - 1]))


def _charged(macs: Ints, rows: Bools) -> int:
    """Σ of ``macs`` [tokens] over ``rows`` bool [tokens]; where one number serves all tokens, by counting them."""
    return int(macs[0]) * int(np.count_nonzero(rows)) if macs.strides == (0,) else int(macs.sum(where=rows))
