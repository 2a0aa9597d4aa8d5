"""Saving over loss: what criteria save net of everything over what they lose, under the ceilings of those who know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emad_ref.report import forms
from emad_ref.report.axes import Axis, Frame, linear, rises
from emad_ref.report.charts.drawing import Chart, Mark, by_family, laid_out, rows_of
from emad_ref.report.reading import Report
from emad_ref.verdict.claims import load_register


def saving_and_loss(report: Report, model: str) -> Chart | None:
    """Net saving over rise of perplexity: ceilings first, so that their lines lie above all others."""
    rows = [row for row in rows_of(report, model, "saving against loss", tables=1) if row["rise %"] is not None]
    if not rows:
        return None
    register = load_register()["EMAD-F1"].thresholds
    saving, most = register["flop_reduction"], register["perplexity_rise"]
    rows.sort(key=lambda row: row["kind"] != "ceiling")
    series = by_family(rows, _mark)
    marks = [mark for one in series for mark in one.marks]
    low, high = min(0.0, *(mark.x for mark in marks)), max(1.5 * most, *(mark.x for mark in marks))
    bottom, top = min(0.0, *(mark.y for mark in marks)), 1.05 * max(1.2 * saving, *(mark.y for mark in marks))

    def axes(frame: Frame) -> tuple[Axis, Axis, tuple[float, float, float, float]]:
        x = rises(low, high, most, frame.left, frame.left + frame.across, lambda v: f"{100 * v:g}")
        y = linear(bottom, top, frame.top + frame.up, frame.top, lambda v: f"{100 * v:.0f}")
        return x, y, (frame.left, frame.top, x.place(most) - frame.left, y.place(saving) - frame.top)

    knowing = [mark for one in series for mark in one.marks if mark.x <= most and _is_ceiling(rows, one.name)]
    best = max((mark.y for mark in knowing), default=0.0)
    return Chart(
        title=f"{model}: saving against loss",
        said=(
            f"Who knew the divergence of every readout for nothing would save up to {forms.percent(best)} of FLOPs net "
            f"at a loss of {forms.percent(most, 0)}: a ceiling, not a promise. The axis is linear up to "
            f"{forms.percent(most, 0)} and logarithmic above. Left and up is better."
        ),
        x_label="rise of perplexity, % (less is better ←)",
        y_label="net FLOPs saved, % (more is better ↑)",
        layouts=laid_out(series, axes),
        marks=marks,
        good=f"saves at least {forms.percent(saving, 0)}, costs at most {forms.percent(most, 0)}",
    )


def _mark(row: Mapping[str, Any]) -> Mark:
    return Mark(
        row["rise %"],
        row["net reduction %"],
        str(row.get("point", row["family"])),
        [
            ("family", row["family"]),
            ("rise of perplexity", forms.rise(row["rise %"])),
            ("net FLOPs saved", forms.percent(row["net reduction %"])),
            ("blocks saved", forms.percent(row["blocks %"])),
        ],
    )


def _is_ceiling(rows: Sequence[Mapping[str, Any]], family: str) -> bool:
    return any(row["family"] == family and row["kind"] == "ceiling" for row in rows)
