"""From the rows of a recorded table to an SVG file's text: nothing is drawn that a table does not show.

``figures.FIGURES`` says what there is to draw; here rows are checked, the canvas is made and the text is written, the
same for the same rows, whatever the reader's own settings of matplotlib are. matplotlib (extra ``report``) is imported
when a figure is drawn.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from emad_ref.errors import BadArgument, EmadError
from emad_ref.report.figures import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
TITLE_WIDTH = 90  # letters
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "emad",  # else ids are drawn at random
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "text.parse_math": False,  # a $ in a model's name is a $
    "text.usetex": False,
}


class PlotsMissing(EmadError):
    """matplotlib is not installed."""


class NothingToDraw(EmadError):
    """Every row lacks a number that the figure needs."""


def require_drawable(figure: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that ``figure`` can draw ``rows``: its columns are there and hold what it draws.

    Raises:
        BadArgument: an unknown figure, no rows, a column that is missing, a value of another kind.
    """
    if figure not in FIGURES:
        raise BadArgument("figure", figure, f"one of {', '.join(FIGURES)}")
    if not rows:
        raise BadArgument("rows", rows, "at least one row", "there is nothing to draw")
    drawing = FIGURES[figure]
    for column in (*drawing.texts, *drawing.numbers, *drawing.gaps, *drawing.lists):
        for number, row in enumerate(rows):
            if column not in row:
                raise BadArgument(f"columns of row {number}", list(row), f"{column!r}, which figure {figure!r} draws")
            value = row[column]
            if column in drawing.lists:
                if not isinstance(value, list):
                    raise BadArgument(f"row {number}: {column}", value, "a list")
                continue
            if column in drawing.texts and not isinstance(value, str):
                raise BadArgument(f"row {number}: {column}", value, "a text")
            if column not in drawing.texts and (isinstance(value, bool) or not isinstance(value, int | float | None)):
                raise BadArgument(f"row {number}: {column}", value, "a number or None")


def draw(figure: str, rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """An SVG file's text. Rows that lack a number are left out, and the figure says how many.

    Args:
        figure: a name of ``FIGURES``, whose entry says which columns it needs.
        rows: of one recorded table.
        title: above the figure.

    Raises:
        BadArgument: as ``require_drawable``.
        NothingToDraw: every row lacks a number.
        PlotsMissing: the extra ``report`` is not installed.
    """
    with drawn(figure, rows, title) as canvas:
        file = io.BytesIO()
        canvas.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().decode()


@contextmanager
def drawn(figure: str, rows: Sequence[Mapping[str, Any]], title: str) -> Iterator[Figure]:
    """The figure as matplotlib holds it, for as long as its style is in force; raises as ``draw`` does."""
    require_drawable(figure, rows)
    drawing = FIGURES[figure]
    complete = [row for row in rows if all(row[column] is not None for column in drawing.numbers)]
    if not complete:
        lacking = [column for column in drawing.numbers if all(row[column] is None for row in rows)]
        raise NothingToDraw(f"no row has {' and '.join(lacking or drawing.numbers)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # no pyplot: no global state, no window
    except ImportError as error:
        raise PlotsMissing(f"{error}; pip install 'pytest-emad[report]'") from error
    with rc_context(), warnings.catch_warnings():
        _plain_style()
        # the reader's machine sets the text: whether its letters are in a font of this one does not matter
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        canvas = Figure(figsize=drawing.size(complete), layout="constrained")
        drawing.paint(canvas, [_printable(row) for row in complete])
        absent = len(rows) - len(complete)
        left_out = f"\n({absent} of {len(rows)} rows lack a number and are not drawn)" if absent else ""
        wrapped = textwrap.fill(NOT_XML.sub("\ufffd", title), TITLE_WIDTH)
        canvas.suptitle(wrapped + left_out, fontsize="medium")
        yield canvas


def _plain_style() -> None:
    import matplotlib

    matplotlib.rcdefaults()
    matplotlib.rcParams.update(STYLE)


def _printable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Letters that XML cannot hold would leave a file that nobody can open."""
    return {key: NOT_XML.sub("\ufffd", value) if isinstance(value, str) else value for key, value in row.items()}
