"""Depth by position: depth along the text, and where it no longer rises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emad_ref.report import forms
from emad_ref.report.charts.drawing import Chart, Mark, Series, plain, rows_of
from emad_ref.report.reading import Report

STRAIGHT = 1e-3  # of a layer: less is rounding


def by_position(report: Report, model: str) -> Chart | None:
    """Under the monotone schedule depth never rises again: the collapse has a place."""
    rows = [row for row in rows_of(report, model, "depth by position") if row["mean depth"] is not None]
    if not rows:
        return None
    series = []
    for column, name in (("mean depth", "depth"), ("mean free depth", "were depth free to rise")):
        marks = [
            Mark(
                number,
                row[column],
                f"positions {row['positions']}",
                [(name, f"{forms.layers(row[column])} layers")],
            )
            for number, row in enumerate(rows)
            if row[column] is not None
        ]
        series.append(Series(name, marks))
    return plain(
        f"{model}: depth by position",
        collapse(rows),
        ("position in the text", "mean depth, layers"),
        series,
        [mark for one in series for mark in one.marks],
        [str(row["positions"]) for row in rows],
    )


def collapse(rows: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: from which positions on depth stays at its lowest; depth never rises again there."""
    depths = [row["mean depth"] for row in rows]
    lowest = min(depths)
    if depths[0] - lowest <= STRAIGHT:
        return "Depth is the same at every position: nothing collapses within this text."
    first = next(at for at, depth in enumerate(depths) if depth - lowest <= 0.1 * (depths[0] - lowest))
    return (
        f"The collapse: from positions {rows[first]['positions']} on, depth is down to {depths[first]:.1f} of "
        f"{depths[0]:.1f} layers and never rises again, for no token may run deeper than the one before it."
    )
