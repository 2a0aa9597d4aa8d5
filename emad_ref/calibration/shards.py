"""Batches of text read by workers: statistics for a calibration, columns for a trace, the same bits as read here.

    unit = SHARD batches → a worker loads the model once, reads them → what each batch came to → added up in order

Batches are cut here, and every worker runs each of them in one forward as this process would: what is added is the same
numbers in the same order, batch by batch. (On processors of different kinds, or with other numbers of threads, matrix
products differ in their last bits, and so does what is made of them.) Windows travel to workers as they are, so that no
worker has to find a corpus; a histogram travels back once a unit, and of it only the cells that hold something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from emad_ref.calibration.resume import Batches, Parts, Plan, taking
from emad_ref.calibration.running import BUCKETS, Statistics
from emad_ref.calibration.trace import TokenSequence, Trace, batched, stream
from emad_ref.models.again import Whence, at_hand
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints
from emad_ref.workers.handing import Crew, handed_out

SHARD = 8  # batches a unit: what one histogram travels for, and the most that a lost worker costs

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Packed:
    """Statistics of a unit's batches, in little: ``tokens`` int64 [batches, bins]; ``sums``, ``squares`` float64
    [batches, bins, L]; ``sequences`` int64 [batches]. Of the histogram, whose counts add up in any order, the cells of
    all batches together that hold something: ``cells`` int64 of it flattened, and their ``counts``.
    """

    tokens: Ints
    sums: Floats
    squares: Floats
    sequences: Ints
    cells: Ints
    counts: Ints

    @staticmethod
    def of(batches: Sequence[Statistics]) -> Packed:
        together = sum((each.histogram for each in batches[1:]), batches[0].histogram)
        cells = np.flatnonzero(together)
        return Packed(
            np.array([each.tokens for each in batches]),
            np.array([each.sums for each in batches]),
            np.array([each.squares for each in batches]),
            np.array([each.sequences for each in batches]),
            cells,
            together.ravel()[cells],
        )

    def unpacked(self) -> list[Statistics]:
        """One per batch, to be added up in order; the last has the histogram of all."""
        shape = (*self.sums.shape[1:], BUCKETS)
        empty, together = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        together.ravel()[self.cells] = self.counts
        last = len(self.sequences) - 1
        return [
            Statistics(tokens, sums, squares, together if number == last else empty, int(sequences))
            for number, (tokens, sums, squares, sequences) in enumerate(
                zip(self.tokens, self.sums, self.squares, self.sequences, strict=True)
            )
        ]


@dataclass(frozen=True, eq=False)
class _Counted:
    """Batches to take statistics of."""

    whence: Whence
    plan: Plan
    batches: Sequence[list[TokenSequence]]

    def read(self) -> Packed:
        taken = taking(at_hand(self.whence).stepper, self.plan)
        return Packed.of([each for _, found in taken(self.batches) for each in found])


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

    def parts(batches: Batches) -> Iterator[tuple[list[TokenSequence], list[Statistics]]]:
        units = (_Counted(whence, plan, shard) for shard in _shards(batches))
        for unit, found in handed_out(crew, _Counted.read, units):
            yield [window for batch in unit.batches for window in batch], found.unpacked()

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
