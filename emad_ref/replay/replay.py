"""Replay: a lens trace + operating points → depths, NLL, correctness and Work, as arrays.

Replay is exact for schedules under which a token's state at its depth is the full model's (monotone, positional,
chunked; free depth with exact backfill). State copying changes later states, so it needs decoding.

This module *derives* work from depths and decoders *count* it; a law holds both equal (``tests/laws``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import assign_bins, extrapolate_exits_between_probes, is_exit_rule_met
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.record import Bools, Floats, Ints, Work
from emad_ref.schedule.derived_work import ProbeCosts, compute_probe_costs, derive_sequence_flops, derive_work
from emad_ref.schedule.schedules import get_point_schedule
from emad_ref.signals import SIGNALS


@dataclass(frozen=True)
class ReplayResult:
    """One operating point on one trace. ``depth`` int64 [tokens]; ``nll_nats`` float64 [tokens] at that depth.

    ``top1`` int32 [tokens]: the likeliest token there. ``macs_per_row``: multiply-adds of one reading by its estimator.
    Tokens emit from the rule's own distribution, so under a pruned vocabulary ``nll_nats`` may be infinite.
    """

    point: OperatingPoint
    depth: Ints
    nll_nats: Floats
    top1: NDArray[np.int32]
    macs_per_row: int = 0

    def is_top1_correct(self, trace: Trace) -> Bools:
        """bool [tokens] whether the top-1 token is the next token of ``trace``."""
        right: Bools = self.top1 == trace.target_int32
        return right

    @cached_property
    def depth_histogram(self) -> Ints:
        """int64 [L + 1] tokens of each depth."""
        return count_tokens_by_depth(self.depth, self.point)


class TraceReplayer:
    """Replays a trace laid out as grids [longest, sequences]: each rule and running minimum is one call for all rows.

    Under ``monotone`` depths equal the running minimum of first fires, sequence by sequence; a law compares both.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.shape = (int(trace.n_decided_by_sequence.max()), trace.n_sequences)
        self.place = (
            trace.token_positions.index_among_decided_tokens * trace.n_sequences + trace.sequence_index
        )  # index of each token in a flattened grid
        self.before = (
            np.arange(len(trace)) * trace.layers - 1
        )  # of each token's first layer in a flattened column, minus 1
        self._read: dict[object, dict[int, NDArray[np.float32]]] = {}
        self._binned: dict[object, NDArray[np.intp]] = {}

    def compute_depths(self, point: OperatingPoint) -> Ints:
        """int64 [tokens] depth of every traced position; every sequence starts at the ceiling.

        Raises:
            BadArgument: a point of another number of layers or another lens, or one that needs decoding.
        """
        if point.layers != self.trace.layers:
            raise BadArgument("point.layers", point.layers, f"{self.trace.layers}, the layers of the trace")
        self.trace.require_lens(point)
        self.trace.require_layers_read(point)
        resolve_depths = get_point_schedule(point).require_depth_resolver()
        depth = np.full(self.shape, point.ceiling, dtype=np.int16)
        bins, signals = (self._bins(point), self._signals(point)) if point.probes else (None, {})
        decided = np.arange(len(depth))[:, None]  # rows of a grid are decided tokens from each sequence's first
        for number in reversed(range(len(point.probes))):  # the smallest probe that fires is written last
            if point.interpolate and number > 0:
                self._between(point, number, signals, bins, depth)
            probe = point.probes[number]
            fired = is_exit_rule_met(point, number, signals[probe], bins, decided)
            # arithmetic, not np.copyto(where=fired): a masked copy works element by element, thirty times as slowly
            np.minimum(depth, np.int16(point.ceiling) - fired * np.int16(point.ceiling - probe), out=depth)
        resolve_depths(point, depth)
        placed: Ints = depth.reshape(-1).take(self.place).astype(np.int64)
        return placed

    def _between(
        self,
        point: OperatingPoint,
        number: int,
        signals: Mapping[int, NDArray[np.float32]],
        bins: NDArray[np.intp] | None,
        depth: NDArray[np.int16],
    ) -> None:
        """Exits after probe ``number`` and below the next, where the line through the last two readings meets τ."""
        before, here = (signals[point.probes[at]] for at in (number - 1, number))
        planned = extrapolate_exits_between_probes(point, number, before, here, bins)
        np.copyto(depth, planned.astype(np.int16), where=planned > 0)

    def _grid(self, column: NDArray[Any]) -> NDArray[Any]:
        """``column`` [tokens] as a grid; NaN (0 for bins), which never fires, after the end of a sequence."""
        grid = np.full(self.shape, np.nan if column.dtype.kind == "f" else 0, dtype=column.dtype)
        grid.reshape(-1)[self.place] = column
        return grid

    def _signals(self, point: OperatingPoint) -> dict[int, NDArray[np.float32]]:
        """Grids of the signals that ``point`` compares, by probe."""
        several = not SIGNALS[point.signal].is_single_layer  # then readings at other layers matter
        key = (point.signal, point.estimator, point.confidence, point.probes if several else ())
        grids = self._read.setdefault(key, {})
        if lacking := [probe for probe in point.probes if probe not in grids]:
            column = self.trace.rule_signal(point)
            grids |= {probe: self._grid(column[:, probe - 1]) for probe in lacking}
        return grids

    def _bins(self, point: OperatingPoint) -> NDArray[np.intp] | None:
        if point.bins.bin_count == 1:
            return None
        key, first = (point.bins, point.probes[0]), point.probes[0] - 1
        if key not in self._binned:
            trace = self.trace
            index = assign_bins(point.bins, trace.position + 1, trace.top1_probability[:, first], trace.top1[:, first])
            self._binned[key] = self._grid(index)
        return self._binned[key]

    def replay(self, point: OperatingPoint) -> ReplayResult:
        depth = self.compute_depths(point)
        stopped = self.before + depth
        nll, top1 = self.trace.emissions_by_exit_layer(point)
        nats = nll.reshape(-1).take(stopped).astype(np.float64)
        macs_per_row = self.trace.macs_per_row.get(point.estimator, 0)
        return ReplayResult(point, depth, nats, top1.reshape(-1).take(stopped), macs_per_row)


def replay_depths(trace: Trace, point: OperatingPoint) -> Ints:
    """int64 [tokens] depth of every traced position under ``point``; every sequence starts at the ceiling."""
    return TraceReplayer(trace).compute_depths(point)


def replay(trace: Trace, point: OperatingPoint) -> ReplayResult:
    """Replay one point: exit depth of each token, and its loss at that depth."""
    return TraceReplayer(trace).replay(point)


def iterate_point_replays(trace: Trace, points: Iterable[OperatingPoint]) -> Iterator[ReplayResult]:
    """Replays of many points over one trace; the layout is computed once."""
    replayer = TraceReplayer(trace)
    for point in points:
        yield replayer.replay(point)


def top1_tokens_at_depth(trace: Trace, depth: Ints) -> Ints:
    """[tokens] top-1 token of a full head at each position's depth."""
    return trace.top1[np.arange(len(trace)), depth - 1].astype(np.int64)


def count_tokens_by_depth(depth: Ints, point: OperatingPoint) -> Ints:
    """int64 [L + 1] number of tokens at each depth, for ``depth`` [tokens]."""
    return np.bincount(depth, minlength=point.layers + 1)


def compute_replayed_decode_work(trace: Trace, replayed: ReplayResult) -> Work:
    """``compute_decode_work`` of a replay.

    Raises:
        BadArgument: as ``compute_decode_work``.
    """
    costs = _probe_costs(trace, replayed.point, replayed.macs_per_row)
    return derive_work(
        replayed.point,
        trace.token_positions,
        replayed.depth,
        replayed.depth_histogram,
        costs,
        trace.lens_macs_by_layer,
    )


def compute_decode_work(trace: Trace, depth: Ints, point: OperatingPoint, macs_per_row: int = 0) -> Work:
    """Work of single-token steps at the trace's positions and ``depth`` [tokens]; a step attends to position + 1 keys.

    ``macs_per_row``: multiply-adds of one reading by the point's estimator, retrieval included; 0 for a full head.

    Raises:
        BadArgument: a confidence rule that the trace does not record.
    """
    costs = _probe_costs(trace, point, macs_per_row)
    return derive_work(
        point, trace.token_positions, depth, count_tokens_by_depth(depth, point), costs, trace.lens_macs_by_layer
    )


def compute_decode_flops_by_sequence(trace: Trace, replayed: ReplayResult, geometry: Geometry) -> Floats:
    """FLOPs of each sequence's decode steps, [sequences]; their sum is ``flops`` of ``compute_decode_work``.

    Mixtures of points, which assign each document to one point, and intervals over documents need costs by document.

    Raises:
        BadArgument: as ``compute_decode_work``.
    """
    point = replayed.point
    costs = _probe_costs(trace, point, replayed.macs_per_row)
    return derive_sequence_flops(
        point, trace.token_positions, replayed.depth, costs, trace.lens_macs_by_layer, geometry
    )


def _probe_costs(trace: Trace, point: OperatingPoint, macs_per_row: int) -> ProbeCosts:
    """Costs of a confidence rule's probe as traced; else of one reading by the estimator."""
    if point.confidence is not None:
        rule = trace.confidence_rule_columns(point)
        return ProbeCosts(rule.heads, rule.shows, rule.macs)
    return compute_probe_costs(point, len(trace), trace.lens_macs_by_layer, macs_per_row)
