"""Tables, notes and operating points that accompany a verdict, as data. The caller records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttachedTable:
    """A table: ``rows`` with common keys, the columns; built-in values only, None for an absent one.

    ``figure``: a name of ``report.figures.FIGURES`` that shows these rows; "": none.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    figure: str = ""


@dataclass(frozen=True)
class Attachments:
    """``points``: rows of the operating-point table, keys as ``report.tables.operating_point_rows`` reads them."""

    tables: tuple[AttachedTable, ...] = ()
    notes: tuple[str, ...] = ()
    points: tuple[Mapping[str, Any], ...] = ()

    def __add__(self, other: Attachments) -> Attachments:
        return Attachments(self.tables + other.tables, self.notes + other.notes, self.points + other.points)
