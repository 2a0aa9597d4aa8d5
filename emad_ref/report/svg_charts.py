"""From values to places in a drawing: linear axes, and one for rises that keeps the good region large.

A drawing is laid out twice, for a desk and for a phone, so that letters have one size on both; ``ChartFrame`` is one.

Lines, marks and intervals as plain data, for the page's template to set as SVG.

Every mark carries its numbers as text, one of which is shown at a time. Lines differ by dash and are named beside
themselves; colour only helps. Knows no chart: what a chart shows, and of which rows, stands in a module of its own.

Saving over loss: what criteria save net of everything over what they lose, under the ceilings of those who know.

Entropy by depth: mean entropy after each layer, and the targets of the probes.

Depth by position: depth along the text, and where it no longer rises.

Cost against quality: rise of perplexity over net FLOPs saved, the region that EMAD-F1 asks for shaded.

What the page draws itself, one chart a module; a chart is None where the report has no numbers for it.

quality   cost against quality: rise of perplexity over net FLOPs saved, the region that the claim asks for shaded
ceilings  saving against loss: what criteria save over what they lose, under those who know the divergence
entropy   entropy by depth: mean entropy after each layer, targets of the probes
position  depth by position: depth along the text, and where it no longer rises
drawing   what all are made of: lines, marks and intervals, laid out for every screen
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emad_ref.report.depth_explorer import rise_bounds
from emad_ref.report.schema import Report
from emad_ref.report.tables import depth_text, interval_text, number_text, percent_text, rise_text
from emad_ref.statistics.verdicts import load_register

TICKS = 5
LINEAR_SHARE = 2.0  # of the rise's axis: the part up to the threshold is as high as so many decades above it


@dataclass(frozen=True)
class ChartFrame:
    """Width and height of a drawing in CSS pixels, and what is left free around the axes."""

    width: int
    height: int
    left: int
    right: int
    top: int = 14
    bottom: int = 46

    @property
    def across(self) -> int:
        return self.width - self.left - self.right

    @property
    def up(self) -> int:
        return self.height - self.top - self.bottom


DESK, PHONE = ChartFrame(760, 380, 64, 170), ChartFrame(340, 300, 52, 12)
FRAMES = {"desk": DESK, "phone": PHONE}


@dataclass(frozen=True)
class ChartAxis:
    """``place``: value → pixels from the left or the top; ``ticks`` (pixels, text)."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def linear_axis(low: float, high: float, start: float, end: float, text: Callable[[float], str]) -> ChartAxis:
    """From ``low`` at pixel ``start`` to ``high`` at ``end``, with round ticks."""
    spread = high - low or 1.0

    def place(value: float) -> float:
        return round(start + (value - low) / spread * (end - start), 1)

    step = _round_step(spread / TICKS)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return ChartAxis(place, [(place(tick * step), text(tick * step)) for tick in range(first, last + 1)])


def symlog_axis(
    low: float, high: float, threshold: float, start: float, end: float, text: Callable[[float], str]
) -> ChartAxis:
    """Linear up to ``threshold``, logarithmic above: rules differ by orders of magnitude."""

    def height(value: float) -> float:
        share = value / threshold
        return LINEAR_SHARE * share if share <= 1 else LINEAR_SHARE + math.log10(share)

    spread = height(high) - height(low)

    def place(value: float) -> float:
        return round(start + (height(value) - height(low)) / spread * (end - start), 1)

    above = [threshold * 10**decade for decade in range(1, 9) if threshold * 10**decade <= high]
    return ChartAxis(place, [(place(tick), text(tick)) for tick in (0.0, threshold / 2, threshold, *above)])


def spread_labels(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Heights of labels, as near to ``places`` as they can be without touching, between ``low`` and ``high``."""
    order = sorted(range(len(places)), key=lambda at: places[at])
    found = [0.0] * len(places)
    before = low - gap
    for at in order:
        before = found[at] = max(places[at], before + gap)
    after = high + gap
    for at in reversed(order):
        after = found[at] = min(found[at], after - gap)
    return [round(each, 1) for each in found]


def _round_step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if rough <= step * power * (1 + 1e-9))


LABEL_GAP = 15.0  # pixels between names of series
Numbers = list[tuple[str, str]]


@dataclass(frozen=True)
class ChartMark:
    """A point in data: ``x``, ``y``, the ends of its interval, and what is said of it."""

    x: float
    y: float
    name: str
    numbers: Numbers
    interval: tuple[float, float] | None = None
    chosen: bool = False


@dataclass(frozen=True)
class ChartSeries:
    """Marks under one name; joined to a line or not."""

    name: str
    marks: list[ChartMark]
    joined: bool = True


@dataclass(frozen=True)
class MarkLayout:
    """A mark in a drawing, pixels; ``low`` and ``high`` the ends of its interval. ``number`` counts all marks."""

    number: int
    x: float
    y: float
    low: float | None
    high: float | None
    chosen: bool
    label: str


@dataclass(frozen=True)
class SeriesLayout:
    """A series in a drawing. ``style`` of ``STYLES``; ``label_y`` height of its name at the right."""

    name: str
    style: int
    path: str
    marks: list[MarkLayout]
    end: tuple[float, float]
    label_y: float


@dataclass(frozen=True)
class ChartLayout:
    """One drawing of a chart: for which ``screen``, its frame, axes, shaded region (x, y, width, height), series."""

    screen: str
    frame: ChartFrame
    x: ChartAxis
    y: ChartAxis
    good: tuple[float, float, float, float] | None
    drawn: list[SeriesLayout]


@dataclass(frozen=True)
class Chart:
    """``said``: what it shows, in a sentence or two; ``good``: what the shaded region is."""

    title: str
    said: str
    x_label: str
    y_label: str
    layouts: list[ChartLayout]
    marks: list[ChartMark]
    good: str = ""
    notes: list[str] = field(default_factory=list)


def figure_rows(report: Report, model: str, figure: str, tables: int | None = None) -> list[Mapping[str, Any]]:
    """Of the first so many tables, or of all."""
    found = [table for table in report["tables"] if table.get("figure") == figure and table["model"] == model]
    return [row for table in found[:tables] for row in table["rows"]]


def family_series(
    rows: Sequence[Mapping[str, Any]], mark: Callable[[Mapping[str, Any]], ChartMark]
) -> list[ChartSeries]:
    """A line per family in the order of ``rows``, its marks from left to right."""
    families = dict.fromkeys(row["family"] for row in rows)
    return [
        ChartSeries(family, sorted((mark(row) for row in rows if row["family"] == family), key=lambda each: each.x))
        for family in families
    ]


def linear_chart(
    title: str,
    said: str,
    labels: tuple[str, str],
    series: list[ChartSeries],
    marks: list[ChartMark],
    places: list[str] | None = None,
) -> Chart:
    """Linear axes, the upright one from 0; ``places`` name the whole numbers across."""
    high = max(mark.y for mark in marks)
    low, last = min(mark.x for mark in marks), max(mark.x for mark in marks)

    def axes(frame: ChartFrame) -> tuple[ChartAxis, ChartAxis, None]:
        inset = 0.04 * frame.across
        x = linear_axis(
            low, max(last, low + 1), frame.left + inset, frame.left + frame.across - inset, lambda v: f"{v:g}"
        )
        whole = range(int(low), int(last) + 1)
        shown = [at for at in whole if at % -(-len(whole) // (frame.across // 56)) == 0]
        x = ChartAxis(x.place, [(x.place(at), places[at] if places else str(at)) for at in shown])
        return x, linear_axis(0.0, 1.05 * high or 1.0, frame.top + frame.up, frame.top, lambda v: f"{v:g}"), None

    return Chart(title, said, *labels, layout_series(series, axes), marks)


def good_region_text(saving: float, most: float) -> str:
    return f"saves at least {percent_text(saving, 0)}, costs at most {percent_text(most, 0)}"


def layout_series(
    series: list[ChartSeries], axes: Callable[[ChartFrame], tuple[ChartAxis, ChartAxis, Any]]
) -> list[ChartLayout]:
    """``series`` drawn for every screen; ``axes`` gives, for a frame, both axes and the region to shade or None."""
    found = []
    for screen, frame in FRAMES.items():
        x, y, good = axes(frame)
        drawn, count = [], 0
        ends = [(x.place(one.marks[-1].x), y.place(one.marks[-1].y)) for one in series]
        heights = spread_labels(
            [end[1] for end in ends], LABEL_GAP, frame.top + LABEL_GAP / 2, frame.top + frame.up - LABEL_GAP / 2
        )
        for style, (one, end, height) in enumerate(zip(series, ends, heights, strict=True)):
            marks = [_layout_mark(count + at, mark, x, y) for at, mark in enumerate(one.marks)]
            path = " ".join(f"{mark.x},{mark.y}" for mark in marks) if one.joined else ""
            drawn.append(SeriesLayout(one.name, style, path, marks, end, height))
            count += len(marks)
        drawn.sort(key=lambda one: (not one.path, -one.style))  # lone marks lie above lines, the first above others
        found.append(ChartLayout(screen, frame, x, y, good, drawn))
    return found


def _layout_mark(number: int, mark: ChartMark, x: ChartAxis, y: ChartAxis) -> MarkLayout:
    low, high = (None, None) if mark.interval is None else (y.place(mark.interval[0]), y.place(mark.interval[1]))
    said = ", ".join(f"{name} {text}" for name, text in mark.numbers)
    return MarkLayout(number, x.place(mark.x), y.place(mark.y), low, high, mark.chosen, f"{mark.name}: {said}")


def saving_and_loss(report: Report, model: str) -> Chart | None:
    """Net saving over rise of perplexity: ceilings first, so that their lines lie above all others."""
    rows = [row for row in figure_rows(report, model, "saving against loss", tables=1) if row["rise %"] is not None]
    if not rows:
        return None
    register = load_register()["EMAD-F1"].thresholds
    saving, most = register["flop_reduction"], register["perplexity_rise"]
    rows.sort(key=lambda row: row["kind"] != "ceiling")
    series = family_series(rows, _ceiling_mark)
    marks = [mark for one in series for mark in one.marks]
    low, high = min(0.0, *(mark.x for mark in marks)), max(1.5 * most, *(mark.x for mark in marks))
    bottom, top = min(0.0, *(mark.y for mark in marks)), 1.05 * max(1.2 * saving, *(mark.y for mark in marks))

    def axes(frame: ChartFrame) -> tuple[ChartAxis, ChartAxis, tuple[float, float, float, float]]:
        x = symlog_axis(low, high, most, frame.left, frame.left + frame.across, lambda v: f"{100 * v:g}")
        y = linear_axis(bottom, top, frame.top + frame.up, frame.top, lambda v: f"{100 * v:.0f}")
        return x, y, (frame.left, frame.top, x.place(most) - frame.left, y.place(saving) - frame.top)

    knowing = [mark for one in series for mark in one.marks if mark.x <= most and _is_ceiling(rows, one.name)]
    best = max((mark.y for mark in knowing), default=0.0)
    return Chart(
        title=f"{model}: saving against loss",
        said=(
            f"Who knew the divergence of every readout for nothing would save up to "
            f"{percent_text(best)} of FLOPs net "
            f"at a loss of {percent_text(most, 0)}: a ceiling, not a promise. The axis is linear up to "
            f"{percent_text(most, 0)} and logarithmic above. Left and up is better."
        ),
        x_label="rise of perplexity, % (less is better ←)",
        y_label="net FLOPs saved, % (more is better ↑)",
        layouts=layout_series(series, axes),
        marks=marks,
        good=good_region_text(saving, most),
    )


def _ceiling_mark(row: Mapping[str, Any]) -> ChartMark:
    return ChartMark(
        row["rise %"],
        row["net reduction %"],
        str(row.get("point", row["family"])),
        [
            ("family", row["family"]),
            ("rise of perplexity", rise_text(row["rise %"])),
            ("net FLOPs saved", percent_text(row["net reduction %"])),
            ("blocks saved", percent_text(row["blocks %"])),
        ],
    )


def _is_ceiling(rows: Sequence[Mapping[str, Any]], family: str) -> bool:
    return any(row["family"] == family and row["kind"] == "ceiling" for row in rows)


def entropy_by_depth(report: Report, model: str) -> Chart | None:
    """Where the profile is flat, a threshold on entropy says little of depth."""
    rows = [row for row in figure_rows(report, model, "entropy profile") if row["mean entropy, nats"] is not None]
    if not rows:
        return None
    profile = [
        ChartMark(
            row["layer"],
            row["mean entropy, nats"],
            f"layer {row['layer']}",
            [
                ("mean entropy", f"{number_text(row['mean entropy, nats'])} nats"),
                ("agrees with the last layer", percent_text(row["agrees with last %"])),
            ],
        )
        for row in rows
    ]
    targets = [
        ChartMark(
            row["layer"],
            row["target, nats"],
            f"target of the probe at layer {row['layer']}",
            [("target", f"{number_text(row['target, nats'])} nats")],
        )
        for row in rows
        if row["target, nats"] is not None
    ]
    series = [
        ChartSeries("mean entropy", profile),
        *([ChartSeries("target of a probe", targets, joined=False)] if targets else []),
    ]
    marks = [*profile, *targets]
    return linear_chart(
        f"{model}: entropy against depth",
        "What the model is still unsure of after each layer. A token leaves at the first probe where its own entropy "
        "has fallen to the target less the margin.",
        ("layer", "entropy, nats"),
        series,
        marks,
    )


FLAT_LAYERS = 1e-3  # of a layer: less is rounding


def depth_by_position(report: Report, model: str) -> Chart | None:
    """Under the monotone schedule depth never rises again: the collapse has a place."""
    rows = [row for row in figure_rows(report, model, "depth by position") if row["mean depth"] is not None]
    if not rows:
        return None
    series = []
    for column, name in (("mean depth", "depth"), ("mean free depth", "were depth free to rise")):
        marks = [
            ChartMark(
                number,
                row[column],
                f"positions {row['positions']}",
                [(name, f"{depth_text(row[column])} layers")],
            )
            for number, row in enumerate(rows)
            if row[column] is not None
        ]
        series.append(ChartSeries(name, marks))
    return linear_chart(
        f"{model}: depth by position",
        collapse_sentence(rows),
        ("position in the text", "mean depth, layers"),
        series,
        [mark for one in series for mark in one.marks],
        [str(row["positions"]) for row in rows],
    )


def collapse_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: from which positions on depth stays at its lowest; depth never rises again there."""
    depths = [row["mean depth"] for row in rows]
    lowest = min(depths)
    if depths[0] - lowest <= FLAT_LAYERS:
        return "Depth is the same at every position: nothing collapses within this text."
    first = next(at for at, depth in enumerate(depths) if depth - lowest <= 0.1 * (depths[0] - lowest))
    return (
        f"The collapse: from positions {rows[first]['positions']} on, depth is down to {depths[first]:.1f} of "
        f"{depths[0]:.1f} layers and never rises again, for no token may run deeper than the one before it."
    )


def cost_and_quality(report: Report, model: str) -> Chart | None:
    """EMAD at every margin with its interval, the points put forward, and other families where they were compared."""
    register = load_register()["EMAD-F1"].thresholds
    saving, most = register["flop_reduction"], register["perplexity_rise"]
    series = [*_margin_series(report, model), *_point_series(report, model), *_best_of_families(report, model)]
    marks = [mark for one in series for mark in one.marks]
    if not marks:
        return None
    bounds = [bound for mark in marks for bound in (mark.y, *(mark.interval or ()))]
    x_low, x_high = min(0.0, *(mark.x for mark in marks)), max(2 * saving, *(mark.x for mark in marks))
    y_low, y_high = min(-most / 4, *bounds), max(1.5 * most, *bounds)

    def axes(frame: ChartFrame) -> tuple[ChartAxis, ChartAxis, tuple[float, float, float, float]]:
        x = linear_axis(x_low, x_high, frame.left, frame.left + frame.across, lambda v: f"{100 * v:.0f}")
        y = symlog_axis(y_low, y_high, most, frame.top + frame.up, frame.top, lambda v: f"{100 * v:g}")
        left, top = x.place(saving), y.place(most)
        return x, y, (left, top, frame.left + frame.across - left, frame.top + frame.up - top)

    best = [mark for mark in marks if mark.x >= saving and mark.y <= most]
    return Chart(
        title=f"{model}: cost against quality",
        said=(
            f"{len(best)} of {len(marks)} points lie in the region that EMAD-F1 asks for. The axis is linear up to "
            f"{percent_text(most, 0)} and logarithmic above. Right and down is better."
        ),
        x_label="net FLOPs saved, % (more is better →)",
        y_label="rise of perplexity, % (less is better ↓)",
        layouts=layout_series(series, axes),
        marks=marks,
        good=good_region_text(saving, most),
    )


def _margin_series(report: Report, model: str) -> list[ChartSeries]:
    rows = figure_rows(report, model, "depth by margin")
    marks = [
        ChartMark(
            row["net reduction %"],
            row["rise %"],
            row["point"],
            [
                ("net FLOPs saved", percent_text(row["net reduction %"])),
                ("rise of perplexity", rise_text(row["rise %"])),
                ("95 % interval", interval_text(rise_bounds(row))),
                ("perplexity", number_text(row["perplexity"])),
                ("mean depth", f"{depth_text(row['mean depth'])} layers"),
            ],
            rise_bounds(row),
        )
        for row in rows
        if row["net reduction %"] is not None and row["rise %"] is not None
    ]
    return [ChartSeries("EMAD, by margin", marks)] if marks else []


def _best_of_families(report: Report, model: str) -> list[ChartSeries]:
    """The best point of each family at each net reduction, from the first such table: later ones are of other text."""
    rows = [
        row
        for row in figure_rows(report, model, "pareto", tables=1)
        if row["net reduction %"] is not None
        and row["rise %"] is not None
        and not row["family"].startswith("EMAD, mean")
    ]
    return family_series(rows, _family_mark)


def _family_mark(row: Mapping[str, Any]) -> ChartMark:
    return ChartMark(
        row["net reduction %"],
        row["rise %"],
        str(row.get("point", row["family"])),
        [
            ("family", row["family"]),
            ("net FLOPs saved", percent_text(row["net reduction %"])),
            ("rise of perplexity", rise_text(row["rise %"])),
        ],
    )


def _point_series(report: Report, model: str) -> list[ChartSeries]:
    chosen = _first_shown(report["points"])
    marks = [
        ChartMark(
            point["net_reduction"],
            point["perplexity_rise"],
            point["name"],
            [
                ("put forward as", ", ".join(point.get("roles") or ()) or "for comparison"),
                ("net FLOPs saved", percent_text(point["net_reduction"])),
                ("rise of perplexity", rise_text(point["perplexity_rise"])),
                ("95 % interval", interval_text(point.get("interval"))),
                ("mean depth", f"{depth_text(point.get('mean_depth'))} layers"),
            ],
            _known_bounds(point.get("interval")),
            chosen=chosen is not None and point["name"] == chosen,
        )
        for point in report["points"]
        if point.get("model", model) == model
        and point.get("net_reduction") is not None
        and point.get("perplexity_rise") is not None
    ]
    return [ChartSeries("points put forward", marks, joined=False)] if marks else []


def _first_shown(points: Sequence[Mapping[str, Any]]) -> str | None:
    """The point whose numbers are shown until another is chosen: that of validation, else any put forward."""
    roles = {point["name"]: point.get("roles") or () for point in points}
    forward = [name for name, own in roles.items() if own]
    return next((name for name in forward if "chosen on validation" in roles[name]), forward[0] if forward else None)


def _known_bounds(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    """An interval both of whose ends are known."""
    if interval is None or interval[0] is None or interval[1] is None:
        return None
    return interval[0], interval[1]


__all__ = ["Chart", "charts", "saving_and_loss"]

CHARTS = (cost_and_quality, saving_and_loss, entropy_by_depth, depth_by_position)


def charts(report: Report) -> list[Chart]:
    """All that the report has numbers for."""
    models = [model["name"] for model in report["models"]]
    found = [make(report, model) for model in models for make in CHARTS]
    return [chart for chart in found if chart is not None]
