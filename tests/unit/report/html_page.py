"""An HTML page read back with the standard library's parser, independent of the code that wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "link", "img", "input", "hr"}


@dataclass
class Cell:
    text: str = ""
    values: list[Any] = field(default_factory=list)


class Page(HTMLParser):
    """``tables``: label → rows of cells, the header first; ``tags`` in order; ``text`` outside tables, drawings and
    scripts; ``scripts`` that run, ``data`` of scripts with data alone.
    """

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[Cell]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", []  # type: str, list[str]
        self.scripts: list[str] = []
        self.data: list[Any] = []
        self._holds_data = False
        self._tables: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self._holds_data = given.get("type") == "application/json"
        if tag == "table":
            self._tables.append(str(given["aria-label"]))
            self.tables[self._tables[-1]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append(Cell())
        elif tag == "data":
            self._rows[-1][-1].values.append(json.loads(str(given["value"])))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"
        if tag == "table":
            self._tables.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if self._holds_data:
                self.data.append(json.loads(data))
            else:
                self.scripts.append(data)
        elif self._tables and self._rows and self._rows[-1] and "tr" in self.open[-4:]:
            self._rows[-1][-1].text += data
        elif not {"svg", "style"} & set(self.open):
            self.text += data

    @property
    def _rows(self) -> list[list[Cell]]:
        return self.tables[self._tables[-1]]

    def named(self, label: str) -> list[dict[str, Cell]]:
        """Return the rows of a table by column name; rows of another length (legs) are left out."""
        head, *rows = self.tables[label]
        names = [cell.text for cell in head]
        return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
