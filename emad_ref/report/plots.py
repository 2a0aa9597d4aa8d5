"""Figures from the rows that reports hold, as SVG: nothing is computed here that a table does not show.

matplotlib (extra ``report``) is imported when a figure is drawn; the same rows give the same text.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from emad_ref.errors import BadArgument, EmadError

MARKS = "os^vDP*X<>"  # one per family: a printed page has no colours
SAVED, RISE = "net reduction %", "rise %"


class PlotsMissing(EmadError):
    """matplotlib is not installed."""


def pareto(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Rise of perplexity over net FLOPs saved, one line per family; an SVG file's text.

    ``rows``: ``family``, ``net reduction %`` and ``rise %`` as fractions, as ``rivals`` puts them on record. The rise
    has a symmetric logarithmic axis, linear below 1 %: families differ by orders of magnitude.

    Raises:
        BadArgument: no rows.
        PlotsMissing: the extra ``report`` is not installed.
    """
    if not rows:
        raise BadArgument("rows", rows, "at least one row", "there is nothing to draw")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # no pyplot: no global state, no window
    except ImportError as error:
        raise PlotsMissing(f"a figure was asked for, but {error}; pip install 'pytest-emad[report]'") from error
    with rc_context({"svg.hashsalt": "emad", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for number, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
            points = sorted((100 * row[SAVED], 100 * row[RISE]) for row in rows if row["family"] == family)
            axes.plot(*zip(*points, strict=True), marker=MARKS[number % len(MARKS)], label=family)
        axes.set_yscale("symlog", linthresh=1.0)
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
        axes.set(xlabel="net FLOPs saved, %", ylabel="rise of perplexity, %", title=title)
        axes.legend(fontsize="small")
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().decode()
