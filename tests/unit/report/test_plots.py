"""Figures show the rows they were given, and the same rows give the same file."""

from __future__ import annotations

import sys

import pytest

from emad_ref.errors import BadArgument
from emad_ref.report.plots import PlotsMissing, pareto

ROWS = [
    {"family": "EMAD", "net reduction %": 0.3, "rise %": 0.004},
    {"family": "EMAD", "net reduction %": 0.5, "rise %": 0.02},
    {"family": "truncation", "net reduction %": 0.4, "rise %": 3.0},
]


def test_every_family_has_its_line_and_the_axes_their_units():
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    drawn = pareto(ROWS, "emad-tiny")
    for text in ("EMAD", "truncation", "emad-tiny", "net FLOPs saved, %", "rise of perplexity, %"):
        assert text in drawn


def test_the_same_rows_give_the_same_text_and_others_do_not():
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    assert pareto(ROWS, "t") == pareto(ROWS, "t")
    assert pareto(ROWS, "t") != pareto(ROWS[:2], "t")


def test_nothing_to_draw_and_nothing_to_draw_with_are_said(monkeypatch):
    with pytest.raises(BadArgument, match="at least one row"):
        pareto([], "t")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotsMissing, match=r"pip install 'pytest-emad\[report\]'"):
        pareto(ROWS, "t")
