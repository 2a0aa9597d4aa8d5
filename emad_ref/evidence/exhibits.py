"""What evidence shows beside a verdict: tables, notes and operating points, as data. Who asks puts them on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """``rows`` share their keys, which are the columns; built-in values only, None for what is absent.

    ``figure``: a name of ``report.figures.FIGURES`` that shows these rows; "": none.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    figure: str = ""


@dataclass(frozen=True)
class Exhibits:
    """``points``: rows of the operating-point table, keys as ``report.tables.point_rows`` reads them."""

    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    points: tuple[Mapping[str, Any], ...] = ()

    def __add__(self, other: Exhibits) -> Exhibits:
        return Exhibits(self.tables + other.tables, self.notes + other.notes, self.points + other.points)
