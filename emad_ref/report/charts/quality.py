"""Cost against quality: rise of perplexity over net FLOPs saved, the region that EMAD-F1 asks for shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emad_ref.report import forms
from emad_ref.report.axes import Axis, Frame, linear, rises
from emad_ref.report.charts.drawing import Chart, Mark, Series, by_family, laid_out, rows_of
from emad_ref.report.passages import interval
from emad_ref.report.reading import Report
from emad_ref.verdict.claims import load_register


def cost_and_quality(report: Report, model: str) -> Chart | None:
    """EMAD at every margin with its interval, the points put forward, and other families where they were compared."""
    register = load_register()["EMAD-F1"].thresholds
    saving, most = register["flop_reduction"], register["perplexity_rise"]
    series = [*_swept(report, model), *_put_forward(report, model), *_families(report, model)]
    marks = [mark for one in series for mark in one.marks]
    if not marks:
        return None
    bounds = [bound for mark in marks for bound in (mark.y, *(mark.interval or ()))]
    x_low, x_high = min(0.0, *(mark.x for mark in marks)), max(2 * saving, *(mark.x for mark in marks))
    y_low, y_high = min(-most / 4, *bounds), max(1.5 * most, *bounds)

    def axes(frame: Frame) -> tuple[Axis, Axis, tuple[float, float, float, float]]:
        x = linear(x_low, x_high, frame.left, frame.left + frame.across, lambda v: f"{100 * v:.0f}")
        y = rises(y_low, y_high, most, frame.top + frame.up, frame.top, lambda v: f"{100 * v:g}")
        left, top = x.place(saving), y.place(most)
        return x, y, (left, top, frame.left + frame.across - left, frame.top + frame.up - top)

    best = [mark for mark in marks if mark.x >= saving and mark.y <= most]
    return Chart(
        title=f"{model}: cost against quality",
        said=(
            f"{len(best)} of {len(marks)} points lie in the region that EMAD-F1 asks for. The axis is linear up to "
            f"{forms.percent(most, 0)} and logarithmic above. Right and down is better."
        ),
        x_label="net FLOPs saved, % (more is better →)",
        y_label="rise of perplexity, % (less is better ↓)",
        layouts=laid_out(series, axes),
        marks=marks,
        good=f"saves at least {forms.percent(saving, 0)}, costs at most {forms.percent(most, 0)}",
    )


def _swept(report: Report, model: str) -> list[Series]:
    rows = rows_of(report, model, "depth by margin")
    marks = [
        Mark(
            row["net reduction %"],
            row["rise %"],
            row["point"],
            [
                ("net FLOPs saved", forms.percent(row["net reduction %"])),
                ("rise of perplexity", forms.rise(row["rise %"])),
                ("95 % interval", forms.between(interval(row))),
                ("perplexity", forms.number(row["perplexity"])),
                ("mean depth", f"{forms.layers(row['mean depth'])} layers"),
            ],
            interval(row),
        )
        for row in rows
        if row["net reduction %"] is not None and row["rise %"] is not None
    ]
    return [Series("EMAD, by margin", marks)] if marks else []


def _families(report: Report, model: str) -> list[Series]:
    """The best point of each family at each net reduction, from the first such table: later ones are of other text."""
    rows = [
        row
        for row in rows_of(report, model, "pareto", tables=1)
        if row["net reduction %"] is not None
        and row["rise %"] is not None
        and not row["family"].startswith("EMAD, mean")
    ]
    return by_family(rows, _mark)


def _mark(row: Mapping[str, Any]) -> Mark:
    return Mark(
        row["net reduction %"],
        row["rise %"],
        str(row.get("point", row["family"])),
        [
            ("family", row["family"]),
            ("net FLOPs saved", forms.percent(row["net reduction %"])),
            ("rise of perplexity", forms.rise(row["rise %"])),
        ],
    )


def _put_forward(report: Report, model: str) -> list[Series]:
    chosen = _shown_first(report["points"])
    marks = [
        Mark(
            point["net_reduction"],
            point["perplexity_rise"],
            point["name"],
            [
                ("put forward as", ", ".join(point.get("roles") or ()) or "for comparison"),
                ("net FLOPs saved", forms.percent(point["net_reduction"])),
                ("rise of perplexity", forms.rise(point["perplexity_rise"])),
                ("95 % interval", forms.between(point.get("interval"))),
                ("mean depth", f"{forms.layers(point.get('mean_depth'))} layers"),
            ],
            _pair(point.get("interval")),
            chosen=chosen is not None and point["name"] == chosen,
        )
        for point in report["points"]
        if point.get("model", model) == model
        and point.get("net_reduction") is not None
        and point.get("perplexity_rise") is not None
    ]
    return [Series("points put forward", marks, joined=False)] if marks else []


def _shown_first(points: Sequence[Mapping[str, Any]]) -> str | None:
    """The point whose numbers are shown until another is chosen: that of validation, else any put forward."""
    roles = {point["name"]: point.get("roles") or () for point in points}
    forward = [name for name, own in roles.items() if own]
    return next((name for name in forward if "chosen on validation" in roles[name]), forward[0] if forward else None)


def _pair(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    """An interval both of whose ends are known."""
    if interval is None or interval[0] is None or interval[1] is None:
        return None
    return interval[0], interval[1]
