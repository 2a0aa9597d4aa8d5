"""What the page draws itself: lines, marks and intervals as plain data, for the template to set as SVG.

    cost and quality    rise of perplexity over net FLOPs saved, the region that the claim asks for shaded
    saving and loss     what criteria save over what they lose, under the ceilings of those who know the divergence
    entropy by depth    mean entropy after each layer, targets of the probes
    depth by position   depth along the text, and where it no longer rises

Every mark carries its numbers as text, one of which is shown at a time. Lines differ by dash and are named beside
themselves; colour only helps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emad_ref.report import forms
from emad_ref.report.axes import FRAMES, Axis, Frame, apart, linear, rises
from emad_ref.report.passages import interval
from emad_ref.report.reading import Report
from emad_ref.verdict.claims import load_register

LINE = 15.0  # pixels between names of series
STRAIGHT = 1e-3  # of a layer: less is rounding
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


def charts(report: Report) -> list[Chart]:
    """All that the report has numbers for."""
    models = [model["name"] for model in report["models"]]
    found = [make(report, model) for model in models for make in CHARTS]
    return [chart for chart in found if chart is not None]


def saving_and_loss(report: Report, model: str) -> Chart | None:
    """Net saving over rise of perplexity: ceilings first, so that their lines lie above all others."""
    rows = [row for row in _rows(report, model, "saving against loss", tables=1) if row["rise %"] is not None]
    if not rows:
        return None
    register = load_register()["EMAD-F1"].thresholds
    saving, most = register["flop_reduction"], register["perplexity_rise"]
    rows.sort(key=lambda row: row["kind"] != "ceiling")
    series = [
        Series(
            family,
            [
                Mark(
                    row["rise %"],
                    row["net reduction %"],
                    str(row.get("point", family)),
                    [
                        ("family", family),
                        ("rise of perplexity", forms.rise(row["rise %"])),
                        ("net FLOPs saved", forms.percent(row["net reduction %"])),
                        ("blocks saved", forms.percent(row["blocks %"])),
                    ],
                )
                for row in sorted((row for row in rows if row["family"] == family), key=lambda row: row["rise %"])
            ],
        )
        for family in dict.fromkeys(row["family"] for row in rows)
    ]
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
        layouts=_laid_out(series, axes),
        marks=marks,
        good=f"saves at least {forms.percent(saving, 0)}, costs at most {forms.percent(most, 0)}",
    )


def _is_ceiling(rows: Sequence[Mapping[str, Any]], family: str) -> bool:
    return any(row["family"] == family and row["kind"] == "ceiling" for row in rows)


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
        layouts=_laid_out(series, axes),
        marks=marks,
        good=f"saves at least {forms.percent(saving, 0)}, costs at most {forms.percent(most, 0)}",
    )


def _swept(report: Report, model: str) -> list[Series]:
    rows = _rows(report, model, "depth by margin")
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
        for row in _rows(report, model, "pareto", tables=1)
        if row["net reduction %"] is not None
        and row["rise %"] is not None
        and not row["family"].startswith("EMAD, mean")
    ]
    return [
        Series(
            family,
            sorted(
                (
                    Mark(
                        row["net reduction %"],
                        row["rise %"],
                        str(row.get("point", family)),
                        [
                            ("family", family),
                            ("net FLOPs saved", forms.percent(row["net reduction %"])),
                            ("rise of perplexity", forms.rise(row["rise %"])),
                        ],
                    )
                    for row in rows
                    if row["family"] == family
                ),
                key=lambda mark: mark.x,
            ),
        )
        for family in dict.fromkeys(row["family"] for row in rows)
    ]


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


def entropy_by_depth(report: Report, model: str) -> Chart | None:
    """Where the profile is flat, a threshold on entropy says little of depth."""
    rows = [row for row in _rows(report, model, "entropy profile") if row["mean entropy, nats"] is not None]
    if not rows:
        return None
    profile = [
        Mark(
            row["layer"],
            row["mean entropy, nats"],
            f"layer {row['layer']}",
            [
                ("mean entropy", f"{forms.number(row['mean entropy, nats'])} nats"),
                ("agrees with the last layer", forms.percent(row["agrees with last %"])),
            ],
        )
        for row in rows
    ]
    targets = [
        Mark(
            row["layer"],
            row["target, nats"],
            f"target of the probe at layer {row['layer']}",
            [("target", f"{forms.number(row['target, nats'])} nats")],
        )
        for row in rows
        if row["target, nats"] is not None
    ]
    series = [
        Series("mean entropy", profile),
        *([Series("target of a probe", targets, joined=False)] if targets else []),
    ]
    marks = [*profile, *targets]
    return _plain(
        f"{model}: entropy against depth",
        "What the model is still unsure of after each layer. A token leaves at the first probe where its own entropy "
        "has fallen to the target less the margin.",
        ("layer", "entropy, nats"),
        series,
        marks,
    )


def by_position(report: Report, model: str) -> Chart | None:
    """Under the monotone schedule depth never rises again: the collapse has a place."""
    rows = [row for row in _rows(report, model, "depth by position") if row["mean depth"] is not None]
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
    return _plain(
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


def _plain(
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

    return Chart(title, said, *labels, _laid_out(series, axes), marks)


def _laid_out(series: list[Series], axes: Callable[[Frame], tuple[Axis, Axis, Any]]) -> list[Layout]:
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


def _rows(report: Report, model: str, figure: str, tables: int | None = None) -> list[Mapping[str, Any]]:
    """Of the first so many tables, or of all."""
    found = [table for table in report["tables"] if table.get("figure") == figure and table["model"] == model]
    return [row for table in found[:tables] for row in table["rows"]]


def _pair(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    """An interval both of whose ends are known."""
    if interval is None or interval[0] is None or interval[1] is None:
        return None
    return interval[0], interval[1]


CHARTS = (cost_and_quality, saving_and_loss, entropy_by_depth, by_position)
