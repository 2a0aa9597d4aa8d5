"""Charts that the page draws itself, as data: what stands where, and what is said of it."""

from __future__ import annotations

import pytest

from emad_ref.report.svg_charts import charts, saving_and_loss
from tests.unit.report.sample import SAVING, report

TABLE = {"title": "criteria and ceilings", "model": "m", "rows": SAVING, "figure": "saving against loss"}


def test_ceilings_come_first_and_the_best_within_a_percent_is_said() -> None:
    chart = saving_and_loss(report(tables=[TABLE]), "m")
    assert chart is not None
    assert [one.name for one in sorted(chart.layouts[0].drawn, key=lambda one: one.style)] == ["oracle", "gate"]
    assert "would save up to 35.0 % of FLOPs net at a loss of 1 %" in chart.said, (
        "the gate's 30 % and 50 % at 6 % are not it"
    )
    assert [(mark.x, mark.y) for mark in chart.marks] == [
        (0.0, 0.0), (0.008, 0.35), (0.06, 0.5), (0.0, 0.0), (0.0095, 0.3), (0.05, 0.4),
    ]  # fmt: skip
    assert ("blocks saved", "45.0 %") in chart.marks[4].numbers


def test_less_loss_stands_left_more_saving_above_and_the_good_region_in_that_corner() -> None:
    chart = saving_and_loss(report(tables=[TABLE]), "m")
    assert chart is not None
    for layout in chart.layouts:
        places = [layout.x.place(mark.x) for mark in chart.marks[:3]]
        heights = [layout.y.place(mark.y) for mark in chart.marks[:3]]
        assert places == sorted(places)
        assert heights == sorted(heights, reverse=True)
        assert layout.good is not None
        left, top, across, up = layout.good
        assert left <= layout.x.place(0.008) <= left + across == pytest.approx(layout.x.place(0.01))
        assert top <= layout.y.place(0.35) <= top + up == pytest.approx(layout.y.place(0.15))


def test_no_table_no_chart() -> None:
    assert saving_and_loss(report(), "m") is None
    assert saving_and_loss(report(tables=[TABLE]), "another") is None
    titles = [chart.title for chart in charts(report(tables=[*report()["tables"], TABLE]))]
    assert titles == ["m: cost against quality", "m: saving against loss"]
