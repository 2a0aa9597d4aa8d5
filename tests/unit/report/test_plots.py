"""Rows are checked by name before they are drawn, and the same rows give the same file whoever draws it."""

from __future__ import annotations

import re
import sys
import warnings
from importlib.util import find_spec
from xml.etree import ElementTree

import pytest

from emad_ref.errors import BadArgument
from emad_ref.report.figures import NothingToDraw, PlotsMissing, draw_figure, open_figure, require_drawable
from tests.unit.report.sample import PARETO

needs_matplotlib = pytest.mark.skipif(not find_spec("matplotlib"), reason="the extra `report` is not installed")
COST = [
    {"decoding": "small alone", "score": 0.25, "MFLOPs per token": 1.5},
    {"decoding": "foreign", "score": 0.75, "MFLOPs per token": None},
]


def texts(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@needs_matplotlib
def test_the_same_rows_give_the_same_text_and_others_do_not():
    assert draw_figure("pareto", PARETO, "t") == draw_figure("pareto", PARETO, "t")
    assert draw_figure("pareto", PARETO, "t") != draw_figure("pareto", PARETO[:2], "t")


@needs_matplotlib
def test_the_readers_own_settings_change_nothing():
    import matplotlib

    plain = draw_figure("pareto", PARETO, "t")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert draw_figure("pareto", PARETO, "t") == plain
        assert matplotlib.rcParams["font.size"] == 30, "and are in force again afterwards"


@needs_matplotlib
def test_text_stays_text_whatever_a_model_is_called():
    """A $ is no formula, markup is no markup; what XML cannot hold is replaced, or nobody could open the file."""
    name = "a$b_{$c & <script>\x1b\ud800 模"
    rows = [row | {"family": name} for row in PARETO]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = texts(draw_figure("pareto", rows, name))
    assert found.count("a$b_{$c & <script>\ufffd\ufffd 模") == 2, "in the title and in the legend"


@needs_matplotlib
def test_long_titles_are_wrapped():
    with open_figure("pareto", PARETO, "a long title " * 20) as canvas:
        lines = canvas.get_suptitle().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 90


@needs_matplotlib
def test_rows_without_a_number_are_left_out_and_counted():
    with open_figure("score against cost", COST, "t") as canvas:
        assert [line.get_label() for line in canvas.axes[0].lines] == ["small alone"]
        assert canvas.get_suptitle() == "t\n(1 of 2 rows lack a number and are not drawn)"
    with open_figure("score against cost", COST[:1], "t") as canvas:
        assert canvas.get_suptitle() == "t"
    with pytest.raises(NothingToDraw, match="no row has MFLOPs per token"):
        draw_figure("score against cost", COST[1:], "t")


@pytest.mark.parametrize(
    ("figure", "rows", "message"),
    [
        ("pie", PARETO, "figure='pie', but expected one of pareto, saving against loss, entropy profile"),
        ("pareto", [], "rows=[], but expected at least one row"),
        ("pareto", [{"family": "a", "rise %": 0.1}], "expected 'net reduction %', which figure 'pareto' draws"),
        ("pareto", [PARETO[0], {"family": "b"}], "columns of row 1=['family'], but expected 'net reduction %'"),
        ("pareto", [PARETO[0] | {"family": 3}], "row 0: family=3, but expected a text"),
        ("pareto", [PARETO[0] | {"rise %": "much"}], "row 0: rise %='much', but expected a number or None"),
        ("pareto", [PARETO[0] | {"rise %": True}], "row 0: rise %=True, but expected a number or None"),
        ("entropy profile", [{"layer": 1, "mean entropy, nats": 1.0, "echo %": 0.1}], "'agrees with last %'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(figure, rows, message):
    with pytest.raises(BadArgument, match=re.escape(message)):
        require_drawable(figure, rows)
    with pytest.raises(BadArgument, match=re.escape(message)):
        draw_figure(figure, rows, "t")


def test_what_to_draw_with_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotsMissing, match=r"pip install 'pytest-emad\[report\]'"):
        draw_figure("pareto", PARETO, "t")
