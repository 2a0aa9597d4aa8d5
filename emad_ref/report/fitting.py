"""Tables as text that never run over the edge: first words wrap, then columns stand below one another.

Cells that are words give way first, the widest of them, down to ``NARROW`` letters or their longest word. Numbers and
intervals stay in one piece. Where even that is too wide the table is cut between columns, in their order, and each part
begins with the first column, so that nothing is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

GAP = 2  # blanks that tabulate puts between columns
HEADED = 2  # by how much it makes a column wider than its heading
NARROW = 16


@dataclass(frozen=True)
class Cell:
    """``text`` as shown, lines apart by newlines; ``value`` of ``report.json``, None where it is the text or absent."""

    text: str
    value: Any = None


Row = dict[str, Cell]


def text_table(rows: Sequence[Row], width: int) -> str:
    """``rows``, which share their keys, as text of at most ``width`` letters a line; "" for none.

    Only a first column that is wider by itself runs over: a name is not cut.
    """
    if not rows:
        return ""
    columns = list(rows[0])
    parts: list[str] = []
    rest = columns[1:]
    while rest or not parts:
        part = _fitting(columns[0], rest, rows, width)
        parts.append(_set(rows, _widths(part, rows, width)))
        rest = rest[len(part) - 1 :]
    return "\n\n".join(parts)


def _fitting(first: str, rest: Sequence[str], rows: Sequence[Row], width: int) -> list[str]:
    """``first`` and as many of ``rest`` as fit when all words are wrapped as far as they go, at least one."""
    part = [first, *rest[:1]]
    for column in rest[1:]:
        if sum(_least(each, rows) for each in (*part, column)) + GAP * len(part) > width:
            break
        part.append(column)
    return part


def _widths(columns: Sequence[str], rows: Sequence[Row], width: int) -> dict[str, int]:
    """Letters for each column: the widest that can still give way does, until all fit."""
    widths = {column: _natural(column, rows) for column in columns}
    least = {column: _least(column, rows) for column in columns}
    while (over := sum(widths.values()) + GAP * (len(columns) - 1) - width) > 0:
        giving = [column for column in columns if widths[column] > least[column]]
        if not giving:
            break
        widest = max(giving, key=lambda column: widths[column])
        second = max((widths[column] for column in giving if column != widest), default=0)
        widths[widest] -= max(1, min(over, widths[widest] - max(second, least[widest])))
    return widths


def _natural(column: str, rows: Sequence[Row]) -> int:
    cells = [len(line) for row in rows for line in row[column].text.split("\n")]
    return max(len(column) + HEADED, *cells)


def _least(column: str, rows: Sequence[Row]) -> int:
    """The least width of a column: its longest word, whole cells where they are numbers, ``NARROW`` where it can."""
    words = [len(word) for row in rows for word in _words(row[column])]
    longest = max([len(word) + HEADED for word in column.split()] + words)
    return max(longest, min(NARROW, _natural(column, rows)))


def _words(cell: Cell) -> list[str]:
    """What may not be broken: the words of a text, the lines of what stands for a number."""
    return cell.text.split() if _wraps(cell) else cell.text.split("\n")


def _wraps(cell: Cell) -> bool:
    return cell.value is None or isinstance(cell.value, str)


def _set(rows: Sequence[Row], widths: dict[str, int]) -> str:
    text = [
        {
            _filled(column, width - HEADED): _filled(row[column].text, width)
            if _wraps(row[column])
            else row[column].text
            for column, width in widths.items()
        }
        for row in rows
    ]
    table: str = tabulate(text, headers="keys", disable_numparse=True)
    return "\n".join(line.rstrip() for line in table.split("\n"))


def _filled(text: str, width: int) -> str:
    """Each line wrapped by itself; a claim's id stays in one piece."""
    return "\n".join(
        textwrap.fill(line, max(width, 1), break_on_hyphens=False, break_long_words=False) for line in text.split("\n")
    )
