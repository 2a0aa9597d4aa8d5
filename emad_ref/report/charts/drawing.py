"""Lines, marks and intervals as plain data, for the page's template to set as SVG.

Every mark carries its numbers as text, one of which is shown at a time. Lines differ by dash and are named beside
themselves; colour only helps. Knows no chart: what a chart shows, and of which rows, stands in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emad_ref.report.axes import FRAMES, Axis, Frame, apart, linear
from emad_ref.report.reading import Report

LINE = 15.0  # pixels between names of series
Numbers = list[tuple[str, str]]


@dataclass(frozen=True)
class Mark:
    """A point in data: ``x``, ``y``, the ends of its interval, and what is said of it."""

    x: float
    y: float
    name: str
    numbers: Numbers
    interval: tuple[float, float] | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Series:
    """Marks under one name; joined to a line or not."""

    name: str
    marks: list[Mark]
    joined: bool = True


@dataclass(frozen=True)
class Placed:
    """A mark in a drawing, pixels; ``low`` and ``high`` the ends of its interval. ``number`` counts all marks."""

    number: int
    x: float
    y: float
    low: float | None
    high: float | None
    chosen: bool
    label: str


@dataclass(frozen=True)
class Drawn:
    """A series in a drawing. ``style`` of ``STYLES``; ``label_y`` height of its name at the right."""

    name: str
    style: int
    path: str
    marks: list[Placed]
    end: tuple[float, float]
    label_y: float


@dataclass(frozen=True)
class Layout:
    """One drawing of a chart: for which ``screen``, its frame, axes, shaded region (x, y, width, height), series."""

    screen: str
    frame: Frame
    x: Axis
    y: Axis
    good: tuple[float, float, float, float] | None
    drawn: list[Drawn]


@dataclass(frozen=True)
class Chart:
    """``said``: what it shows, in a sentence or two; ``good``: what the shaded region is."""

    title: str
    said: str
    x_label: str
    y_label: str
    layouts: list[Layout]
    marks: list[Mark]
    good: str = ""
    notes: list[str] = field(default_factory=list)


def rows_of(report: Report, model: str, figure: str, tables: int | None = None) -> list[Mapping[str, Any]]:
    """Of the first so many tables, or of all."""
    found = [table for table in report["tables"] if table.get("figure") == figure and table["model"] == model]
    return [row for table in found[:tables] for row in table["rows"]]


def by_family(rows: Sequence[Mapping[str, Any]], mark: Callable[[Mapping[str, Any]], Mark]) -> list[Series]:
    """A line per family in the order of ``rows``, its marks from left to right."""
    families = dict.fromkeys(row["family"] for row in rows)
    return [
        Series(family, sorted((mark(row) for row in rows if row["family"] == family), key=lambda each: each.x))
        for family in families
    ]


def plain(
    title: str,
    said: str,
    labels: tuple[str, str],
    series: list[Series],
    marks: list[Mark],
    places: list[str] | None = None,
) -> Chart:
    """Linear axes, the upright one from 0; ``places`` name the whole numbers across."""
    high = max(mark.y for mark in marks)
    low, last = min(mark.x for mark in marks), max(mark.x for mark in marks)

    def axes(frame: Frame) -> tuple[Axis, Axis, None]:
        inset = 0.04 * frame.across
        x = linear(low, max(last, low + 1), frame.left + inset, frame.left + frame.across - inset, lambda v: f"{v:g}")
        whole = range(int(low), int(last) + 1)
        shown = [at for at in whole if at % -(-len(whole) // (frame.across // 56)) == 0]
        x = Axis(x.place, [(x.place(at), places[at] if places else str(at)) for at in shown])
        return x, linear(0.0, 1.05 * high or 1.0, frame.top + frame.up, frame.top, lambda v: f"{v:g}"), None

    return Chart(title, said, *labels, laid_out(series, axes), marks)


def laid_out(series: list[Series], axes: Callable[[Frame], tuple[Axis, Axis, Any]]) -> list[Layout]:
    """``series`` drawn for every screen; ``axes`` gives, for a frame, both axes and the region to shade or None."""
    found = []
    for screen, frame in FRAMES.items():
        x, y, good = axes(frame)
        drawn, count = [], 0
        ends = [(x.place(one.marks[-1].x), y.place(one.marks[-1].y)) for one in series]
        heights = apart([end[1] for end in ends], LINE, frame.top + LINE / 2, frame.top + frame.up - LINE / 2)
        for style, (one, end, height) in enumerate(zip(series, ends, heights, strict=True)):
            marks = [_placed(count + at, mark, x, y) for at, mark in enumerate(one.marks)]
            path = " ".join(f"{mark.x},{mark.y}" for mark in marks) if one.joined else ""
            drawn.append(Drawn(one.name, style, path, marks, end, height))
            count += len(marks)
        drawn.sort(key=lambda one: (not one.path, -one.style))  # lone marks lie above lines, the first above others
        found.append(Layout(screen, frame, x, y, good, drawn))
    return found


def _placed(number: int, mark: Mark, x: Axis, y: Axis) -> Placed:
    low, high = (None, None) if mark.interval is None else (y.place(mark.interval[0]), y.place(mark.interval[1]))
    said = ", ".join(f"{name} {text}" for name, text in mark.numbers)
    return Placed(number, x.place(mark.x), y.place(mark.y), low, high, mark.chosen, f"{mark.name}: {said}")
