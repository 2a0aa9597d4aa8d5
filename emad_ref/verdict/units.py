"""What is resampled, as types: one entry per document, per item or per timed pair, so that none passes for another.

Windows cut from one document are not independent, nor are questions about one paragraph, nor tokens of either. A column
of windows becomes a column of documents through ``ByDocument.summed`` and in no other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.record import Ints


@dataclass(frozen=True, eq=False)  # holds an array: a column is itself, not its values
class Units:
    """``values`` [units, …], one entry per independent unit; ``noun``: what a unit is called in ``Claim.minimum``."""

    values: NDArray[Any]
    noun: ClassVar[str] = "units"

    def __post_init__(self) -> None:
        if isinstance(self.values, Units) or np.ndim(self.values) == 0:
            expected = f"an array [{self.noun}, …]"
            raise BadArgument(type(self).__name__, self.values, expected, f"one entry for each of the {self.noun}")

    def __len__(self) -> int:
        return len(self.values)

    def like(self, values: NDArray[Any]) -> Self:
        """Other ``values`` of the same units, in the same order."""
        if len(values) != len(self.values):
            raise BadArgument("values", len(values), f"{len(self.values)} entries", f"one for each of the {self.noun}")
        return type(self)(values)


class ByDocument(Units):
    """One entry per document: its windows are summed."""

    noun = "documents"

    @classmethod
    def summed(cls, values: NDArray[Any], document: DocumentOf) -> ByDocument:
        """Sums of ``values`` [n, …] within each document, in the order of their numbers.

        >>> windows = DocumentOf(np.array([0, 0, 1]))
        >>> ByDocument.summed(np.array([2.0, 3.0, 4.0]), windows).values
        array([5., 4.])

        Raises:
            BadArgument: another number of entries than ``document`` has.
        """
        return cls(document.sums(np.asarray(values)))


class ByItem(Units):
    """One entry per item of a task: a question, a source to summarise."""

    noun = "items"


class ByPair(Units):
    """One entry per pair of timed requests, in the order in which the pairs were taken."""

    noun = "pairs"


@dataclass(frozen=True, eq=False)
class DocumentOf:
    """``number`` int64 [n]: which document each token, or each window, belongs to."""

    number: Ints

    def __len__(self) -> int:
        return len(self.number)

    @property
    def place(self) -> NDArray[np.intp]:
        """[n] index of each entry's document among those present, 0 …"""
        place: NDArray[np.intp] = np.unique(self.number, return_inverse=True)[1]
        return place

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """[documents, …] sums of ``values`` [n, …] within each document."""
        if len(values) != len(self.number):
            raise BadArgument("values", len(values), f"{len(self.number)} entries", "one per token or window")
        _, first = np.unique(self.number, return_index=True)
        if (np.diff(self.number) < 0).any():
            order = np.argsort(self.number, kind="stable")
            values, first = values[order], np.unique(self.number[order], return_index=True)[1]
        return np.add.reduceat(values, first, axis=0)
