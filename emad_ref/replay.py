"""Replay: a lens trace + operating points → depths, NLL, correctness and Work, as arrays.

Exact for schedules under which a token's state at its depth is the full model's (monotone; free depth with exact
backfill). State copying changes later states: it is decoded, never replayed.

Work is *derived* here from depths; decoders *count* it; equality is a law (``tests/laws``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import fires
from emad_ref.record import FILLS, READOUTS, Floats, Ints, Work
from emad_ref.schedule.monotone import first_fires

FULL, EXACT = READOUTS.index("full"), FILLS.index("exact")


@dataclass(frozen=True)
class Replay:
    """One operating point on one trace. ``depth`` int64 [tokens]; ``nll_nats`` float64 [tokens] at that depth."""

    point: OperatingPoint
    depth: Ints
    nll_nats: Floats


class Ladder:
    """A trace laid out as [sequences, longest], so that the running minimum of all sequences is one call."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.row = trace.sequence
        self.column = np.arange(len(trace)) - np.repeat(trace.starts[:-1], trace.lengths)
        self.shape = (trace.sequences, int(trace.lengths.max()))

    def running_minimum(self, first: Ints) -> Ints:
        """Running minimum of ``first`` [tokens] within each sequence."""
        grid = np.full(self.shape, np.iinfo(np.int16).max, dtype=np.int16)
        grid[self.row, self.column] = first
        return np.minimum.accumulate(grid, axis=1)[self.row, self.column].astype(np.int64)


def _require_same_layers(trace: Trace, point: OperatingPoint) -> None:
    if point.layers != trace.layers:
        raise BadArgument("point.layers", point.layers, f"{trace.layers}, the layers of the trace")


def depths(trace: Trace, point: OperatingPoint, ladder: Ladder | None = None) -> Ints:
    """int64 [tokens] depth of every traced position under ``point``; every sequence starts at the ceiling."""
    _require_same_layers(trace, point)
    probes = np.array(point.probes, dtype=np.int64)
    signal = trace.entropy_nats[:, probes - 1]
    first = first_fires(fires(point, signal), probes, point.ceiling)
    if point.schedule == "monotone":
        return (ladder or Ladder(trace)).running_minimum(first)
    return first


def replay(trace: Trace, point: OperatingPoint, ladder: Ladder | None = None) -> Replay:
    """Depths and the NLL at those depths."""
    depth = depths(trace, point, ladder)
    return Replay(point, depth, trace.nll_nats[np.arange(len(trace)), depth - 1].astype(np.float64))


def replay_all(trace: Trace, points: Iterable[OperatingPoint]) -> Iterator[Replay]:
    """Replays of many points over one trace; the layout is computed once."""
    ladder = Ladder(trace)
    for point in points:
        yield replay(trace, point, ladder)


def sums(trace: Trace, values: NDArray) -> Floats:
    """[sequences] sums of ``values`` [tokens] within each sequence."""
    return np.add.reduceat(np.asarray(values, dtype=np.float64), trace.starts[:-1])


def argmax_at(trace: Trace, depth: Ints) -> Ints:
    """[tokens] top-1 token of each position at its depth."""
    return trace.top1[np.arange(len(trace)), depth - 1].astype(np.int64)


def derived_work(trace: Trace, point: OperatingPoint, depth: Ints) -> tuple[Work, Work]:
    """(decode, prompt) Work of decoding every sequence alone, token by token, at ``depth`` [tokens].

    The prompt before the last position is one forward at the ceiling: n positions against n keys each.
    """
    return decode_work(trace.position, depth, point), prompt_work(trace.prompts, point)


def decode_work(position: Ints, depth: Ints, point: OperatingPoint) -> Work:
    """Work of single-token steps at ``position`` [tokens] (keys attended: position + 1) and ``depth`` [tokens]."""
    work = Work.none(point.layers)
    free = point.schedule == "free_eager"
    for layer in range(1, point.layers + 1):
        ran = depth >= layer
        if free:  # backfill: every block runs, but the last only has to write K and V where its output is not read
            ran = ran | (layer < point.ceiling)
            work.fills[EXACT, layer - 1] = int((~ran).sum()) if layer == point.ceiling else 0
        work.tokens[layer - 1] = int(ran.sum())
        work.context[layer - 1] = int((position[ran] + 1).sum())
        read = depth >= layer if layer in point.probes else depth == layer
        work.readout_rows[FULL, layer - 1] = int(read.sum())
    return work


def prompt_work(prompts: Ints, point: OperatingPoint) -> Work:
    """Work of prompts of ``prompts`` [sequences] positions before the last, each in one forward at the ceiling."""
    work = Work.none(point.layers)
    work.tokens[: point.ceiling] = int(prompts.sum())
    work.context[: point.ceiling] = int((prompts**2).sum())
    return work
