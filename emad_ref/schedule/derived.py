"""Work that depths imply: what decoding runs for each token of sequences that are fed one by one, each alone.

Layer by layer: the block for tokens that a schedule runs there (``Schedule.ran``), K/V-only passes for those it fills,
a readout where a probe is asked, and a head where a token leaves. Decoders *count* what they execute; that both are
equal is a law (``tests/laws``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.readout.states import StateTranslators
from emad_ref.record import FILLS, READOUTS, Bools, Floats, Ints, Work
from emad_ref.schedule.interface import Places, Ran
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
class _Step:
    """What one layer runs: ``heads`` bool [kinds] of a probe, ``macs`` [tokens] of one, beside a full head's own.

    ``probed``, ``emitted`` bool [tokens]: who is probed here, None where no probe is, and whose token comes from a head
    of its own, with ``ahead`` multiply-adds a row in front of it. ``kind``: which of ``FILLS`` its fills are, with
    ``fill_macs`` [tokens] in front of each.
    """

    ran: Ran
    heads: Bools
    macs: Ints
    probed: Bools | None
    emitted: Bools
    ahead: int
    kind: int
    fill_macs: Ints


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
    work = Work.none(point.layers)
    last, tokens, keys = None, 0, 0
    for layer, step in enumerate(_steps(point, places, depth, probed, ahead, translators)):
        if step.ran is not last:
            last, tokens, keys = step.ran, int(np.count_nonzero(step.ran.keys)), int(step.ran.keys.sum())
        work.tokens[layer], work.context[layer] = tokens, keys
        if step.ran.fills is not None:
            work.fills[step.kind, layer] = int(step.ran.fills.sum())
            work.fill_macs[layer] = int(step.fill_macs.sum(where=step.ran.fills))
        if step.probed is not None:
            work.readout_rows[step.heads, layer] = int(np.count_nonzero(step.probed))
            work.readout_macs[step.heads, layer] = _charged(step.macs, step.probed)
        alone = int(np.count_nonzero(step.emitted))
        work.readout_rows[FULL, layer] += alone
        work.readout_macs[FULL, layer] += alone * step.ahead
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
    each = np.full(len(depth), float(geometry.input_flops()))
    for step in _steps(point, places, depth, probed, ahead, translators):
        keys = step.ran.keys
        each += (keys > 0) * geometry.block_flops() + keys * geometry.attention_flops()
        each += step.emitted * (geometry.head_flops() + 2 * step.ahead)
        if step.probed is not None:
            head = int(step.heads[FULL]) * geometry.head_flops()
            each += step.probed * (head + 2 * int(step.heads.sum()) * step.macs)
        if step.ran.fills is not None:
            each += step.ran.fills * (geometry.kv_fill_flops() + 2 * step.fill_macs)
    return each


def _steps(
    point: OperatingPoint,
    places: Places,
    depth: Ints,
    probes: Probed,
    ahead: Ints,
    translators: StateTranslators | None,
) -> Iterator[_Step]:
    """Layer by layer from the first; between two depths that tokens have, all layers run the same."""
    schedule = schedule_of(point)
    asked, kind = schedule.asked(point, places.decided), FILLS.index(schedule.fills)
    others = {1, point.ceiling, point.ceiling + 1, *(np.flatnonzero(np.bincount(depth)) + 1).tolist()}
    nothing, nowhere = np.zeros(len(depth), dtype=np.int64), np.zeros(point.layers, dtype=np.int64)
    for layer in range(1, point.layers + 1):
        probed, emitted = asked & (depth >= layer) if layer in point.probes else None, depth == layer
        if probed is not None and probes.shows[layer - 1]:
            emitted &= ~probed
        if layer in others:
            ran = schedule.ran(places, depth, layer, point.ceiling)
        heads, macs = probes.heads[:, layer - 1], probes.macs[:, layer - 1]
        before = nowhere if translators is None else translators.macs_below(layer)
        filled = nothing if ran.fills is None else before[depth - 1]
        yield _Step(ran, heads, macs, probed, emitted, int(ahead[layer - 1]), kind, filled)


def _charged(macs: Ints, rows: Bools) -> int:
    """Σ of ``macs`` [tokens] over ``rows`` bool [tokens]; where one number serves all tokens, by counting them."""
    return int(macs[0]) * int(np.count_nonzero(rows)) if macs.strides == (0,) else int(macs.sum(where=rows))
