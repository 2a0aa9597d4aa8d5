"""Replay: a lens trace + operating points → depths, NLL, correctness and Work, as arrays.

Exact for schedules under which a token's state at its depth is the full model's (monotone; free depth with exact
backfill). State copying changes later states: it is decoded, never replayed.

Work is *derived* here from depths; decoders *count* it; equality is a law (``tests/laws``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import fires
from emad_ref.record import FILLS, READOUTS, Floats, Ints, Work

FULL, EXACT = READOUTS.index("full"), FILLS.index("exact")


@dataclass(frozen=True)
class Replay:
    """One operating point on one trace. ``depth`` int64 [tokens]; ``nll_nats`` float64 [tokens] at that depth."""

    point: OperatingPoint
    depth: Ints
    nll_nats: Floats


class Ladder:
    """A trace laid out as grids [longest, sequences], so that each rule and running minimum is one call over all rows.

    ``schedule.monotone.depths`` is the plain form of what happens here; a law holds the two together.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        column = np.arange(len(trace)) - np.repeat(trace.starts[:-1], trace.lengths)
        self.shape = (int(trace.lengths.max()), trace.sequences)
        self.place = column * trace.sequences + trace.sequence  # of each token in a flattened grid
        self.tokens = np.arange(len(trace)) * trace.layers  # of each token's first layer in a flattened column
        self._signals: dict[int, NDArray[np.float32]] = {}

    def signal(self, layer: int) -> NDArray[np.float32]:
        """Signal after ``layer`` as a grid; NaN, which never fires, where a sequence has ended."""
        if layer not in self._signals:
            grid = np.full(self.shape, np.nan, dtype=np.float32)
            grid.reshape(-1)[self.place] = self.trace.entropy_nats[:, layer - 1]
            self._signals[layer] = grid
        return self._signals[layer]

    def depths(self, point: OperatingPoint) -> Ints:
        """int64 [tokens] depth of every traced position; every sequence starts at the ceiling."""
        if point.layers != self.trace.layers:
            raise BadArgument("point.layers", point.layers, f"{self.trace.layers}, the layers of the trace")
        depth = np.full(self.shape, point.ceiling, dtype=np.int16)
        for number in reversed(range(len(point.probes))):  # the smallest probe that fires is written last
            probe = point.probes[number]
            np.copyto(depth, np.int16(probe), where=fires(point, number, self.signal(probe)))
        if point.schedule == "monotone":
            np.minimum.accumulate(depth, axis=0, out=depth)
        placed: Ints = depth.reshape(-1)[self.place].astype(np.int64)
        return placed

    def replay(self, point: OperatingPoint) -> Replay:
        depth = self.depths(point)
        nll = self.trace.nll_nats.reshape(-1)[self.tokens + (depth - 1)]
        return Replay(point, depth, nll.astype(np.float64))


def depths(trace: Trace, point: OperatingPoint) -> Ints:
    """int64 [tokens] depth of every traced position under ``point``; every sequence starts at the ceiling."""
    return Ladder(trace).depths(point)


def replay(trace: Trace, point: OperatingPoint) -> Replay:
    """Depths and the NLL at those depths."""
    return Ladder(trace).replay(point)


def replay_all(trace: Trace, points: Iterable[OperatingPoint]) -> Iterator[Replay]:
    """Replays of many points over one trace; the layout is computed once."""
    ladder = Ladder(trace)
    for point in points:
        yield ladder.replay(point)


def sums(trace: Trace, values: NDArray[Any]) -> Floats:
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
