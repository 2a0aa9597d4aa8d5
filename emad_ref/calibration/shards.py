"""Batches of text read by workers: statistics for a calibration, columns for a trace, the same bits as read here.

    unit = SHARD batches → a worker loads the model once, reads them → what each batch came to → added up in order

Batches are cut here, and every worker runs each of them in one forward as this process would: what is added is the same
numbers in the same order. (On processors of different kinds, or with other numbers of threads, matrix products differ in
their last bits, and so does what is made of them.) Windows travel to workers as they are, so that no worker has to find
a corpus; of a histogram only the cells that hold something travel back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from emad_ref.calibration.resume import Batches, Parts, Plan, first_probe
from emad_ref.calibration.running import BUCKETS, Statistics, statistics_of
from emad_ref.calibration.trace import TokenSequence, Trace, batched, stream, trace_batch
from emad_ref.models.again import Whence, at_hand
from emad_ref.point import BinSpec, OperatingPoint
from emad_ref.record import Floats, Ints
from emad_ref.workers.handing import Crew, handed_out

SHARD = 4  # batches a unit: seconds of work, and the most that a lost worker costs

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sparse:
    """``Statistics`` with no empty cell: ``cells`` int64 of the flattened histogram, and their ``counts``."""

    tokens: Ints
    sums: Floats
    squares: Floats
    cells: Ints
    counts: Ints
    sequences: int

    @staticmethod
    def of(statistics: Statistics) -> Sparse:
        flat = statistics.histogram.ravel()
        cells = np.flatnonzero(flat)
        return Sparse(
            statistics.tokens, statistics.sums, statistics.squares, cells, flat[cells], statistics.sequences
        )

    def whole(self) -> Statistics:
        histogram = np.zeros((*self.sums.shape, BUCKETS), dtype=np.int64)
        histogram.ravel()[self.cells] = self.counts
        return Statistics(self.tokens, self.sums, self.squares, histogram, self.sequences)


@dataclass(frozen=True, eq=False)
class _Counted:
    """Batches to take statistics of."""

    whence: Whence
    bins: BinSpec
    first: int | None
    batches: Sequence[list[TokenSequence]]

    def read(self) -> list[Sparse]:
        stepper = at_hand(self.whence).stepper
        return [Sparse.of(statistics_of(trace_batch(stepper, each), self.bins, self.first)) for each in self.batches]


@dataclass(frozen=True, eq=False)
class _Traced:
    """Batches to trace, ``rules`` beside the plain columns."""

    whence: Whence
    rules: tuple[OperatingPoint, ...]
    batches: Sequence[list[TokenSequence]]

    def read(self) -> list[Trace]:
        stepper = at_hand(self.whence).stepper
        return [trace for each in self.batches for trace in stream(stepper, each, rules=self.rules)]


def statistics_by(crew: Crew, whence: Whence, plan: Plan) -> Parts:
    """Statistics taken by ``crew``, of the model that comes from ``whence``.

    Iterating raises WorkersLost, and what loading or reading raise in a worker.
    """

    def parts(batches: Batches) -> Iterator[tuple[list[TokenSequence], Statistics]]:
        units = (_Counted(whence, plan.bins, first_probe(plan), shard) for shard in _shards(batches))
        for unit, found in handed_out(crew, _Counted.read, units):
            for batch, sparse in zip(unit.batches, found, strict=True):
                yield batch, sparse.whole()

    return parts


def traces_by(
    crew: Crew, whence: Whence, sequences: Iterable[TokenSequence], rules: Sequence[OperatingPoint] = ()
) -> Iterator[Trace]:
    """Traces batch by batch, as ``trace.stream`` gives them. Raises as ``statistics_by``."""
    units = (_Traced(whence, tuple(rules), shard) for shard in _shards(batched(sequences)))
    for _, found in handed_out(crew, _Traced.read, units):
        yield from found


def _shards(batches: Iterable[T]) -> Iterator[list[T]]:
    source = iter(batches)
    while shard := list(islice(source, SHARD)):
        yield shard
