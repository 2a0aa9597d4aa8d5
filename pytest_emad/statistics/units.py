"""Units of resampling, as types: one entry per document, per item or per timed pair; mixing them is a type error.

Windows cut from one document are not independent, nor are questions about one paragraph, nor tokens of either. A column
of windows becomes a column of documents through ``ByDocument.from_summed_windows`` and in no other way. A column of
items knows its dependent items: questions about one paragraph, repeats of one item.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)  # holds an array: columns compare by identity
class Units:
    """``values`` [units, …], one entry per independent unit; ``noun`` is the unit's name in ``Claim.minimum``."""

    values: NDArray[Any]
    noun: ClassVar[str] = "units"

    def __post_init__(self) -> None:
        if isinstance(self.values, Units) or np.ndim(self.values) == 0:
            expected = f"an array [{self.noun}, …]"
            raise BadArgument(type(self).__name__, self.values, expected, f"one entry for each of the {self.noun}")

    def __len__(self) -> int:
        return len(self.values)

    def with_values(self, values: NDArray[Any]) -> Self:
        """Other ``values`` of the same units, in the same order."""
        if len(values) != len(self.values):
            raise BadArgument("values", len(values), f"{len(self.values)} entries", f"one for each of the {self.noun}")
        return replace(self, values=values)

    def select(self, mask: Bools) -> Self:
        """The units for which ``mask`` [units] is true."""
        return replace(self, values=self.values[mask])

    @property
    def ids(self) -> Ints | None:
        """[units] ids of the units, if any, by which two columns are paired."""
        return None

    @property
    def independent_values(self) -> NDArray[Any]:
        """[n, …] ``values`` summed over dependent units, for resampling and for counting n."""
        return self.values


@dataclass(frozen=True, eq=False)
class ByDocument(Units):
    """One entry per document: its windows are summed.

    ``number`` int64 [documents]: id of each document, all different. Windows know their document, and become documents
    only through ``from_summed_windows``; uncut documents are ``ByDocument.from_whole_documents``.

    Raises:
        BadArgument: two entries of one document; another count of numbers than of entries.
    """

    number: Ints
    noun = "documents"

    def __post_init__(self) -> None:
        super().__post_init__()
        if np.shape(self.number) != (len(self.values),):
            expected = f"int64 [{len(self.values)}]"
            raise BadArgument("number", np.shape(self.number), expected, "one number for each document")
        if len(np.unique(self.number)) < len(self.number):
            entries, documents = len(self.number), len(np.unique(self.number))
            expected = f"one entry for each of {documents} documents"
            raise BadArgument(
                "number", f"{entries} entries", expected, "sum windows first: ByDocument.from_summed_windows"
            )

    @classmethod
    def from_whole_documents(cls, values: NDArray[Any]) -> ByDocument:
        """Whole documents, none of which is part of another."""
        return cls(values, np.arange(np.shape(values)[0] if np.ndim(values) else 0, dtype=np.int64))

    @classmethod
    def from_summed_windows(cls, values: NDArray[Any], document: DocumentMembership) -> ByDocument:
        """Sums of ``values`` [n, …] within each document, in the order of their numbers.

        >>> windows = DocumentMembership(np.array([0, 0, 4]))
        >>> found = ByDocument.from_summed_windows(np.array([2.0, 3.0, 4.0]), windows)
        >>> found.values, found.number
        (array([5., 4.]), array([0, 4]))

        Raises:
            BadArgument: another number of entries than ``document`` has.
        """
        return cls(document.sum_by_document(np.asarray(values)), np.unique(document.number))

    def select(self, mask: Bools) -> Self:
        """The documents for which ``mask`` [documents] is true, with their numbers."""
        return replace(self, values=self.values[mask], number=self.number[mask])

    @property
    def ids(self) -> Ints | None:
        return self.number


@dataclass(frozen=True, eq=False)
class ByItem(Units):
    """One entry per item of a task: a question, a source to summarise.

    ``cluster`` int64 [items]: items of one number depend on each other (questions about one paragraph, repeats of one
    item) and count as one independent item. Items known to be independent are ``ByItem.from_independent_items``.

    Raises:
        BadArgument: another number of clusters than of items, or clusters that are no whole numbers.
    """

    cluster: Ints
    noun = "items"

    def __post_init__(self) -> None:
        super().__post_init__()
        cluster = np.asarray(self.cluster)
        if cluster.shape != (len(self.values),) or not np.issubdtype(cluster.dtype, np.integer):
            form, expected = f"{cluster.dtype}{list(cluster.shape)}", f"int64 [{len(self.values)}]"
            raise BadArgument(
                "cluster", form, expected, "one number per item; ByItem.from_independent_items where all differ"
            )

    @classmethod
    def from_independent_items(cls, values: NDArray[Any]) -> ByItem:
        """Items of which none depends on another.

        >>> len(ByItem.from_independent_items(np.array([True, False])).independent_values)
        2
        """
        return cls(values, np.arange(np.shape(values)[0] if np.ndim(values) else 0, dtype=np.int64))

    def select(self, mask: Bools) -> Self:
        """The items for which ``mask`` [items] is true, in their clusters."""
        return replace(self, values=self.values[mask], cluster=self.cluster[mask])

    @property
    def independent_values(self) -> NDArray[Any]:
        """[clusters, …] sums of ``values`` within each cluster; the values themselves if all items are distinct.

        >>> ByItem(np.array([1.0, 2.0, 4.0]), np.array([7, 7, 9])).independent_values
        array([3., 4.])
        """
        return (
            self.values
            if self.has_only_independent_items
            else DocumentMembership(self.cluster).sum_by_document(self.values)
        )

    @property
    def ids(self) -> Ints | None:
        return self.cluster

    @property
    def has_only_independent_items(self) -> bool:
        """Whether every item is its own cluster."""
        return len(np.unique(self.cluster)) == len(self.cluster)


@dataclass(frozen=True, eq=False)
class ByPair(Units):
    """One entry per pair of timed requests, in the order in which the pairs were taken.

    ``process`` int64 [pairs]: the process that timed each; None: all in one. Each process draws memory layout,
    allocator and kernels anew, and its pairs share them, so these pairs are not independent observations (Kalibera and
    Jones 2013, "Rigorous benchmarking in reasonable time").

    Raises:
        BadArgument: another number of processes than of pairs, or processes that are no whole numbers.
    """

    process: Ints | None = None
    noun = "pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.process is None:
            return
        process = np.asarray(self.process)
        if process.shape != (len(self.values),) or not np.issubdtype(process.dtype, np.integer):
            form, expected = f"{process.dtype}{list(process.shape)}", f"int64 [{len(self.values)}]"
            raise BadArgument("process", form, expected, "one number per pair; None where all ran in one process")

    def select(self, mask: Bools) -> Self:
        """The pairs for which ``mask`` [pairs] is true, in their processes."""
        return replace(self, values=self.values[mask], process=None if self.process is None else self.process[mask])

    @property
    def independent_values(self) -> NDArray[Any]:
        """[processes, …] sums of ``values`` within each process; the values themselves if all ran in one.

        >>> ByPair(np.array([1.0, 2.0, 4.0]), np.array([0, 0, 1])).independent_values
        array([3., 4.])
        """
        return (
            self.values if self.process_count == 1 else DocumentMembership(self._numbered).sum_by_document(self.values)
        )

    @property
    def ids(self) -> Ints | None:
        return self.process

    @property
    def process_count(self) -> int:
        """Number of processes in which the pairs were timed."""
        return len(np.unique(self._numbered))

    @property
    def _numbered(self) -> Ints:
        return np.zeros(len(self.values), dtype=np.int64) if self.process is None else self.process


@dataclass(frozen=True, eq=False)
class DocumentMembership:
    """``number`` int64 [n]: the document of each token or window."""

    number: Ints

    def __len__(self) -> int:
        return len(self.number)

    @property
    def document_index(self) -> NDArray[np.intp]:
        """[n] index of each entry's document among those present, from 0."""
        place: NDArray[np.intp] = np.unique(self.number, return_inverse=True)[1]
        return place

    def sum_by_document(self, values: NDArray[Any]) -> NDArray[Any]:
        """[documents, …] sums of ``values`` [n, …] within each document."""
        if len(values) != len(self.number):
            raise BadArgument("values", len(values), f"{len(self.number)} entries", "one per token or window")
        if values.dtype == np.bool_:
            values = values.astype(np.int64)  # so that sums of booleans count
        _, first = np.unique(self.number, return_index=True)
        if (np.diff(self.number) < 0).any():
            order = np.argsort(self.number, kind="stable")
            values, first = values[order], np.unique(self.number[order], return_index=True)[1]
        return np.add.reduceat(values, first, axis=0)


def sum_blocks_of_neighbours(values: Floats, blocks: int) -> Floats:
    """[blocks] sums of ``values`` [n] that follow one another, of n / blocks each.

    >>> sum_blocks_of_neighbours(np.array([1.0, 2.0, 4.0, 8.0, 16.0]), 2)
    array([ 3., 28.])
    """
    starts = np.linspace(0, len(values), blocks, endpoint=False).round().astype(np.intp)
    return np.add.reduceat(values, starts)


def effective_sample_size(weight: NDArray[Any]) -> int:
    """Effective number of units, (Σ w)² / Σ w², rounded down: equal units whose mean varies as much (Kish 1965).

    >>> effective_sample_size(np.array([1.0, 1.0, 1.0])), effective_sample_size(np.array([6.0, 1.0, 1.0, 1.0, 1.0]))
    (3, 2)
    """
    w = np.asarray(weight, dtype=np.float64)
    w = w / w.max()
    return max(1, math.floor(float(w.sum() ** 2 / (w @ w)) * (1 + 1e-9)))


def format_unit_count(n: int, noun: str) -> str:
    """``n`` of a plural ``noun``: ``30 documents``, ``1 document``."""
    return f"{n} {noun.removesuffix('s') if n == 1 else noun}"


def float_column(name: str, column: Units, kind: type[Units]) -> Floats:
    """[n] values of ``column`` as float64.

    Raises:
        BadArgument: another kind of unit, no single column, no value, or one that is not finite.
    """
    if not isinstance(column, kind):  # the type checker's error, for callers without a type checker
        raise BadArgument(name, type(column).__name__, kind.__name__, "see statistics.units: the unit is a type")
    array = np.asarray(column.values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise BadArgument(name, f"shape {array.shape}", "one column with at least one value")
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        one = column.noun.removesuffix("s")
        remedy = f"look at {one} {wrong[0]} (of 0–{len(array) - 1}): {len(wrong)} of {len(array)} {column.noun} are so"
        raise BadArgument(f"{name}[{wrong[0]}]", float(array[wrong[0]]), "a finite number", remedy)
    return array


def require_paired(name: str, column: Units, other: Units, remedy: str) -> None:
    """Raise BadArgument unless both columns have the same units: as many, with the same numbers or clusters."""
    if np.shape(column.values) != np.shape(other.values):
        raise BadArgument(name, np.shape(column.values), f"shape {np.shape(other.values)}", remedy)
    mine, theirs = column.ids, other.ids
    if mine is not None and theirs is not None and not np.array_equal(mine, theirs):
        raise BadArgument(f"{name}.names", mine[:5], f"the {column.noun} of the other side, {theirs[:5]}", remedy)


def sum_dependent_units(column: Units) -> Floats:
    """[n] sums over dependent units."""
    return np.asarray(column.independent_values, dtype=np.float64)
