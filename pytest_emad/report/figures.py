"""Figures of recorded tables, drawn by matplotlib as SVG: one function per figure, listed in ``FIGURES``.

    cost against quality      rise of perplexity over net FLOPs saved, the region that EMAD-F1 requires shaded
    pareto                    the same, one line per family (EMAD, "Experiments")
    saving against loss       net FLOPs and blocks saved over the rise of perplexity, oracles in black
    entropy profile           mean entropy after each layer, targets of the probes, and prediction by low entropy
    depth by position         depth with and without the monotone schedule, and entropy, along the text
    final token rank          rank of the final token after each layer, quantiles (early-exit LLMs, Figure 1)
    confidence and accuracy   confidence and accuracy of each layer (Figures 2 and 3)
    exits by minimum layer    mean exit and score over the minimum exit layer, one line per rule (Figures 6 to 9)
    FLOPs by rule             FLOPs per item, confidence and decoder stacked (Figures 10 to 13)
    score against cost        score over FLOPs per token, one mark per decoding method (EAD, trade-off)
    depth by margin           rise of perplexity and mean depth over net FLOPs saved, one mark per margin
    depth by token            depth along one text at three margins
    model by token            entropy along a text that a pair wrote, its rolling mean, and which model wrote each token

Tables of the last three are ``EMBEDDED``: they have list columns or one row per token, and the page shows them as an
interactive text. Figures in ``CAPTIONS`` open the page, each with a sentence computed from its rows.

Each series has its own mark, line or hatch, so a print without colours stays readable. The same rows give the same file
under any matplotlib settings. matplotlib (extra ``report``) is imported on first use.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emad_ref.errors import BadArgument, EmadError, is_number, require_extra
from pytest_emad.statistics.number_format import format_percent
from pytest_emad.statistics.verdicts import load_register

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Rows = Sequence[Mapping[str, Any]]

MARKERS = "os^vDP*X<>"
LINE_STYLES = ("-", "--", ":", "-.")
FORWARD = "selected points"
QUANTILES = ("25%", "50%", "75%", "95%")  # as ``sweep.diagnostics`` names them
FLAT_LAYERS = 1e-3  # a smaller difference of depth is rounding
RISE = "shown rise, nats"  # column of the entropy profile: rise from the layer before, if EMAD-E1 shows it
LOSSES = (0.1, 1.0, 5.0)  # percent, rises of perplexity at which savings are reported
SAVING_COLUMNS = {"net reduction %": "net FLOPs saved, %", "blocks %": "blocks saved, %"}
FLOP_PARTS = {"confidence MFLOPs": "///", "decoder MFLOPs": ""}  # column → hatch
WIDTH, HEIGHT = 7.5, 3.0  # inches, of one panel as wide as the page
BAR, LINE = 0.28, 0.22  # inches, of one bar and of one legend line
LEGEND_LETTERS = 110  # letters per line of the legend


@dataclass(frozen=True)
class FigureSpec:
    """How to draw a figure, and the columns it needs.

    ``texts``    columns of text.
    ``numbers``  columns without which a row cannot be drawn.
    ``gaps``     columns whose None leaves a gap in a line.
    ``lists``    columns of lists.
    ``size``     rows → (width, height) in inches.
    """

    paint: Callable[[Figure, Rows], None]
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    gaps: tuple[str, ...]
    size: Callable[[Rows], tuple[float, float]]
    lists: tuple[str, ...] = ()


def draw_cost_and_quality(canvas: Figure, rows: Rows) -> None:
    """Draw points with their 95 % intervals. Points of ``FORWARD`` are not joined to a line."""
    axes = canvas.add_subplot()
    saving, rise = (100 * bound for bound in _wanted())
    for number, (series, own) in enumerate(_group_by("series", rows).items()):
        points = sorted((100 * row["net reduction %"], 100 * row["rise %"]) for row in own)
        style = _series_style(number) | ({"linestyle": "none"} if series == FORWARD else {})
        (line,) = axes.plot(*zip(*points, strict=True), **style, label=series)
        for row in own:
            if row["rise low %"] is not None and row["rise high %"] is not None:
                ends = (100 * row["rise low %"], 100 * row["rise high %"])
                axes.vlines(100 * row["net reduction %"], *ends, linewidth=0.8, color=line.get_color())
    _set_scale(axes, "symlog", linthresh=rise)
    axes.set_xlim(right=max(2 * saving, axes.get_xlim()[1]))
    axes.set_ylim(top=max(1.5 * rise, axes.get_ylim()[1]))
    corners = (axes.get_xlim()[1], axes.get_ylim()[0])
    axes.fill_between([saving, corners[0]], corners[1], rise, color="tab:green", alpha=0.15, linewidth=0)
    axes.set(xlabel="net FLOPs saved, % (more is better →)", ylabel="rise of perplexity, %\n(less is better ↓)")
    _legend_below(canvas)


def _wanted() -> tuple[float, float]:
    """The saving and the rise of perplexity that EMAD-F1 requires, as fractions."""
    thresholds = load_register()["EMAD-F1"].thresholds
    return thresholds["flop_reduction"], thresholds["perplexity_rise"]


def draw_pareto(canvas: Figure, rows: Rows) -> None:
    """Draw one line per family. The rise's axis is linear below 1 %, since families differ by orders of magnitude."""
    axes = canvas.add_subplot()
    for number, (family, own) in enumerate(_group_by("family", rows).items()):
        points = sorted((100 * row["net reduction %"], 100 * row["rise %"]) for row in own)
        axes.plot(*zip(*points, strict=True), **_series_style(number), label=family)
    _set_scale(axes, "symlog", linthresh=1.0)
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="net FLOPs saved, %", ylabel="rise of perplexity, %")
    _legend_below(canvas)


def draw_saving_against_loss(canvas: Figure, rows: Rows) -> None:
    """Draw savings over loss; oracles are black lines without marks."""
    panels = canvas.subplots(2, sharex=True)
    for axes, (column, label) in zip(panels, SAVING_COLUMNS.items(), strict=True):
        kinds = {"ceiling": 0, "criterion": 0}
        for family, own in _group_by("family", rows).items():
            kind = "ceiling" if own[0]["kind"] == "ceiling" else "criterion"
            points = sorted((100 * row["rise %"], 100 * row[column]) for row in own)
            style = _series_style(kinds[kind])
            if kind == "ceiling":
                style = {"color": "black", "linestyle": LINE_STYLES[kinds[kind] % len(LINE_STYLES)], "linewidth": 1.8}
            axes.plot(*zip(*points, strict=True), **style, label=family)
            kinds[kind] += 1
        for level in LOSSES:
            axes.axvline(level, color="grey", linewidth=0.8, linestyle="--")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    axes.set_xscale("symlog", linthresh=LOSSES[0], subs=[2, 5])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="rise of perplexity, %")
    axes.set_xlim(0, max(2 * LOSSES[-1], max(100 * row["rise %"] for row in rows if row["kind"] == "ceiling")))
    _legend_below(canvas)


def draw_entropy_profile(canvas: Figure, rows: Rows) -> None:
    """Draw entropy above, with steps shown to rise in red, and below its AUROC; 0.5 is chance."""
    entropy, worth = canvas.subplots(2, sharex=True)
    layers = [row["layer"] for row in rows]
    entropy.plot(layers, _column(rows, "mean entropy, nats"), **_series_style(0), label="mean entropy")
    targets = [(row["layer"], row["target, nats"]) for row in rows if row["target, nats"] is not None]
    if targets:
        hollow = {"linestyle": "--", "markerfacecolor": "none", "markersize": 9}
        entropy.plot(*zip(*targets, strict=True), marker="D", **hollow, label="target of a probe")
    for number, row in enumerate(entropy_rise_rows(rows)):
        step = [before for before in rows if before["layer"] == row["layer"] - 1] + [row]
        label = "_" if number else "rises from the layer before"
        where = [each["layer"] for each in step], _column(step, "mean entropy, nats")
        entropy.plot(*where, color="crimson", linewidth=3.5, alpha=0.6, label=label)
    entropy.set(ylabel="entropy, nats")
    entropy.legend(fontsize="small")
    columns = {
        "echo %": "echo of the input, share",
        "agrees with last %": "agrees with the last layer, share",
        "AUROC of low entropy for that": "AUROC of low entropy for that",
    }
    for number, (column, label) in enumerate(columns.items()):
        worth.plot(layers, _column(rows, column), **_series_style(number), label=label)
    worth.axhline(0.5, color="grey", linewidth=0.8, linestyle="--")
    worth.set(ylabel="share, AUROC", ylim=(-0.05, 1.05))
    _layers_along(worth)
    worth.legend(fontsize="small")


def entropy_rise_rows(rows: Rows) -> list[Mapping[str, Any]]:
    """Layers to which entropy is shown to rise."""
    return [row for row in rows if row[RISE]]


def draw_depth_by_position(canvas: Figure, rows: Rows) -> None:
    """Draw depth by position. Positions double from tick to tick, so the axis is logarithmic."""
    depth, entropy = canvas.subplots(2, sharex=True)
    places = range(len(rows))
    for number, column in enumerate(("mean depth", "mean free depth")):
        depth.plot(places, _column(rows, column), **_series_style(number), label=column)
    depth.set(ylabel="layers")
    depth.set_ylim(bottom=0)
    depth.legend(fontsize="small")
    entropy.plot(places, _column(rows, "mean entropy of the last layer, nats"), **_series_style(2))
    entropy.set(xlabel="position", ylabel="entropy of the\nlast layer, nats")
    entropy.set_xticks(list(places), [row["positions"] for row in rows])


def draw_final_token_rank(canvas: Figure, rows: Rows) -> None:
    for axes, (task, own) in _task_panels(canvas, rows):
        layers = [row["layer"] for row in own]
        for number, quantile in enumerate(QUANTILES):
            axes.plot(layers, _column(own, quantile), **_series_style(number), label=f"{quantile} of tokens")
        _set_scale(axes, "log")
        axes.set(ylabel="rank of the final token, at most", title=task)
        _layers_along(axes)
        axes.label_outer()
    _legend_below(canvas)


def draw_confidence_accuracy_by_layer(canvas: Figure, rows: Rows) -> None:
    for axes, (task, own) in _task_panels(canvas, rows):
        layers = [row["layer"] for row in own]
        for number, column in enumerate(("confidence", "accuracy", "ECE")):
            axes.plot(layers, _column(own, column), **_series_style(number), label=column)
        axes.set(ylabel="share", title=task, ylim=(-0.05, 1.05))
        _layers_along(axes)
        axes.label_outer()
    _legend_below(canvas)


def draw_exits_by_min_layer(canvas: Figure, rows: Rows) -> None:
    """Draw one line per rule; a rule with a single minimum layer, such as full depth, is a single mark."""
    tasks = _group_by("task", rows)
    grid = canvas.subplots(2, len(tasks), sharex=True, squeeze=False)
    for column, (task, own) in enumerate(tasks.items()):
        for axes, measure in zip(grid[:, column], ("mean exit", "score"), strict=True):
            for number, rule in enumerate(_group_by("rule", rows)):
                points = sorted((row["j"], row[measure]) for row in own if row["rule"] == rule)
                axes.plot([j for j, _ in points], [value for _, value in points], **_series_style(number), label=rule)
            axes.set(ylabel=measure)
        grid[0, column].set_title(task)
        grid[1, column].set_xlabel("minimum exit layer j")
    _legend_below(canvas)


def draw_flops_by_rule(canvas: Figure, rows: Rows) -> None:
    tasks = _group_by("task", rows)
    heights = [len(own) for own in tasks.values()]
    panels = canvas.subplots(len(tasks), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, (task, own) in zip(panels, tasks.items(), strict=True):
        names = [f"{row['rule']}, j = {row['j']}" for row in own]
        left = [0.0] * len(own)
        for part, hatch in FLOP_PARTS.items():
            axes.barh(range(len(own)), _column(own, part), left=left, hatch=hatch, edgecolor="black", label=part)
            left = [before + row[part] for before, row in zip(left, own, strict=True)]
        axes.set_yticks(range(len(own)), names, fontsize="small")
        axes.invert_yaxis()  # rows from top to bottom
        axes.set(title=task)
    panels[-1].set_xlabel("MFLOPs per item, encoder left out")
    _legend_below(canvas)


def draw_score_against_cost(canvas: Figure, rows: Rows) -> None:
    axes = canvas.add_subplot()
    for number, row in enumerate(rows):
        lone = _series_style(number) | {"linestyle": "none"}
        axes.plot([row["MFLOPs per token"]], [row["score"]], **lone, label=row["decoding"])
    axes.set(xlabel="MFLOPs per token", ylabel="score")
    axes.set_xlim(left=0)
    _legend_below(canvas)


def draw_depth_by_margin(canvas: Figure, rows: Rows) -> None:
    """Draw one mark per margin, with the interval of the rise as a bar if there is one."""
    rise, depth = canvas.subplots(2, sharex=True)
    saved = [100 * row["net reduction %"] for row in rows]
    rise.plot(saved, [100 * row["rise %"] for row in rows], **_series_style(0))
    for row in rows:
        if row["rise low %"] is not None and row["rise high %"] is not None:
            ends = (100 * row["rise low %"], 100 * row["rise high %"])
            rise.vlines(100 * row["net reduction %"], *ends, linewidth=0.8)
    rise.set(ylabel="rise of perplexity, %")
    depth.plot(saved, _column(rows, "mean depth"), **_series_style(1))
    depth.set(xlabel="net FLOPs saved, %", ylabel="mean depth, layers")
    depth.set_ylim(bottom=0)


def draw_depth_by_token(canvas: Figure, rows: Rows) -> None:
    """Draw depth at three margins, from no saving to the largest. Prompt tokens have no depth."""
    axes = canvas.add_subplot()
    decided = [row["depths"] for row in rows if row["depths"]]
    count = min(map(len, decided), default=0)
    for number, margin in enumerate(sorted({0, count // 2, count - 1} & set(range(count)))):
        label = f"margin {margin + 1} of {count}, by what it saves"
        axes.plot(range(len(decided)), [depths[margin] for depths in decided], **_series_style(number), label=label)
    axes.set(xlabel="token after the prompt", ylabel="depth, layers")
    axes.set_ylim(bottom=0)
    _legend_below(canvas)


def draw_model_by_token(canvas: Figure, rows: Rows) -> None:
    axes = canvas.add_subplot()
    measured = [row for row in rows if row["entropy, bits"] is not None]
    places = range(len(measured))
    for number, column in enumerate(("entropy, bits", "rolling, bits")):
        axes.plot(places, _column(measured, column), **_series_style(number), label=column)
    axes.plot(places, _column(measured, "threshold, bits"), color="grey", linestyle="--", label="threshold, bits")
    large = [place for place in places if measured[place]["model"] == "large"]
    axes.plot(
        large, [0.0] * len(large), linestyle="none", marker="|", color="black", label="written by the large model"
    )
    axes.set(xlabel="token after the prompt", ylabel="entropy, bits")
    _legend_below(canvas)


def _task_panels(canvas: Figure, rows: Rows) -> list[tuple[Axes, tuple[str, Rows]]]:
    """One panel per task, side by side."""
    tasks = _group_by("task", rows)
    axes = canvas.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    return list(zip(axes, tasks.items(), strict=True))


def _group_by(column: str, rows: Rows) -> dict[str, Rows]:
    """Rows by the text of a column, both in order of first appearance."""
    return {key: [row for row in rows if row[column] == key] for key in dict.fromkeys(row[column] for row in rows)}


def _column(rows: Rows, name: str) -> list[float]:
    return [float("nan") if row[name] is None else row[name] for row in rows]


def _series_style(number: int) -> dict[str, Any]:
    """Mark, line and colour of a series; after ten series the marks repeat with another line."""
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINE_STYLES[number // len(MARKERS) % len(LINE_STYLES)],
        "color": f"C{number % 10}",
    }


def _layers_along(axes: Axes) -> None:
    """Number the layers of the horizontal axis in whole numbers, also if there are few."""
    axes.set_xlabel("layer")
    axes.locator_params(axis="x", integer=True)


def _set_scale(axes: Axes, scale: str, **options: Any) -> None:
    """Set a logarithmic axis whose ticks are plain numbers."""
    axes.set_yscale(scale, subs=[2, 5], **options)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def _legend_below(canvas: Figure) -> None:
    """Draw one legend for all panels, which share their series."""
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=_legend_columns(labels), fontsize="small")


def _legend_columns(labels: Iterable[str]) -> int:
    """Number of labels that fit in one line."""
    return max(1, min(3, LEGEND_LETTERS // (6 + max(map(len, labels)))))


def _panels_size(count: float, legend: str = "") -> Callable[[Rows], tuple[float, float]]:
    """Size of ``count`` panels above a legend with one entry for each text of the column ``legend``."""

    def size(rows: Rows) -> tuple[float, float]:
        labels = list(_group_by(legend, rows)) if legend else [""]
        return WIDTH, count * HEIGHT + LINE * -(-len(labels) // _legend_columns(labels))

    return size


def _bars_size(rows: Rows) -> tuple[float, float]:
    return WIDTH, 1.2 + 0.4 * len(_group_by("task", rows)) + BAR * len(rows)


FIGURES: dict[str, FigureSpec] = {
    "cost against quality": FigureSpec(
        draw_cost_and_quality,
        ("series",),
        ("net reduction %", "rise %"),
        ("rise low %", "rise high %"),
        _panels_size(1.3, "series"),
    ),
    "pareto": FigureSpec(draw_pareto, ("family",), ("net reduction %", "rise %"), (), _panels_size(1, "family")),
    "saving against loss": FigureSpec(
        draw_saving_against_loss, ("family", "kind"), ("rise %", *SAVING_COLUMNS), (), _panels_size(2, "family")
    ),
    "entropy profile": FigureSpec(
        draw_entropy_profile,
        (),
        ("layer", "mean entropy, nats", "echo %", "agrees with last %"),
        ("target, nats", "AUROC of low entropy for that", RISE),
        _panels_size(2),
    ),
    "depth by position": FigureSpec(
        draw_depth_by_position,
        ("positions",),
        ("mean depth", "mean free depth", "mean entropy of the last layer, nats"),
        (),
        _panels_size(2),
    ),
    "final token rank": FigureSpec(draw_final_token_rank, ("task",), ("layer", *QUANTILES), (), _panels_size(1)),
    "confidence and accuracy": FigureSpec(
        draw_confidence_accuracy_by_layer, ("task",), ("layer", "confidence", "accuracy", "ECE"), (), _panels_size(1)
    ),
    "exits by minimum layer": FigureSpec(
        draw_exits_by_min_layer, ("task", "rule"), ("j", "mean exit", "score"), (), _panels_size(2, "rule")
    ),
    "FLOPs by rule": FigureSpec(draw_flops_by_rule, ("task", "rule"), ("j", *FLOP_PARTS), (), _bars_size),
    "score against cost": FigureSpec(
        draw_score_against_cost, ("decoding",), ("score", "MFLOPs per token"), (), _panels_size(1, "decoding")
    ),
    "depth by margin": FigureSpec(
        draw_depth_by_margin,
        ("point", "put forward as"),
        ("mean depth", "net reduction %", "perplexity", "rise %"),
        ("margin, nats", "rise low %", "rise high %"),
        _panels_size(2),
        ("probes", "thresholds, nats"),
    ),
    "depth by token": FigureSpec(
        draw_depth_by_token, ("token", "part"), (), (), _panels_size(1), ("depths", "instead", "entropy, nats")
    ),
    "model by token": FigureSpec(
        draw_model_by_token,
        ("token", "part", "model"),
        ("threshold, bits",),
        ("entropy, bits", "rolling, bits"),
        _panels_size(1),
    ),
}
EMBEDDED = ("depth by margin", "depth by token", "model by token")


# ---------------------------------------------------------------- captions


def quality_caption(rows: Rows) -> str:
    """Sentence about the number of points with the saving and loss that EMAD-F1 requires."""
    saving, most = _wanted()
    good = sum(row["net reduction %"] >= saving and row["rise %"] <= most for row in rows)
    return (
        f"{good} of {len(rows)} points lie in the shaded region that EMAD-F1 asks for: at least {_share(saving)} of "
        f"FLOPs saved at a rise of perplexity of at most {_share(most)}. The upright axis is linear up to that rise "
        "and logarithmic above."
    )


def oracle_caption(rows: Rows) -> str:
    """Sentence about the largest saving of an oracle at the loss that EMAD-F1 allows."""
    _, most = _wanted()
    within = [row["net reduction %"] for row in rows if row["kind"] == "ceiling" and row["rise %"] <= most]
    return (
        f"Upper bound: an oracle that knows each layer's divergence from the final output would save "
        f"{_share(max(within, default=0.0), 1)} of FLOPs net at a rise of perplexity of at most {_share(most)}."
    )


def entropy_caption(rows: Rows) -> str:
    """Sentence about the decision of a probe, and whether entropy falls with depth as it assumes."""
    decides = "A token exits at the first probe where its entropy is at most the probe's target minus the margin."
    if not (rising := entropy_rise_rows(rows)):
        return decides
    lowest = min(rows, key=lambda row: row["mean entropy, nats"])
    return (
        f"{decides} Entropy does not fall with depth: it rises at {len(rising)} of {len(rows) - 1} steps and is lowest "
        f"after layer {lowest['layer']}, whose likeliest token is the final one for "
        f"{_share(lowest['agrees with last %'])} of tokens."
    )


def depth_collapse_caption(rows: Rows) -> str:
    """Sentence about the position from which depth stays at its lowest under the monotone schedule."""
    depths = [row["mean depth"] for row in rows]
    lowest = min(depths)
    if depths[0] - lowest <= FLAT_LAYERS:
        return f"Depth is {lowest:.1f} layers at every position of this text."
    first = next(at for at, depth in enumerate(depths) if depth - lowest <= 0.1 * (depths[0] - lowest))
    return (
        f"The collapse: from positions {rows[first]['positions']} on, depth is down to {depths[first]:.1f} of "
        f"{depths[0]:.1f} layers and never rises again, since no token may run deeper than the one before it."
    )


def _share(fraction: float, digits: int = 0) -> str:
    return format_percent(fraction, f"z.{digits}f")


CAPTIONS: dict[str, Callable[[Rows], str]] = {
    "cost against quality": quality_caption,
    "saving against loss": oracle_caption,
    "entropy profile": entropy_caption,
    "depth by position": depth_collapse_caption,
}


def figure_caption(figure: str, rows: Rows) -> str:
    """The sentence beside a figure that opens the page; "" for other figures."""
    complete = _complete_rows(FIGURES[figure], rows)
    return CAPTIONS[figure](complete) if figure in CAPTIONS and complete else ""


# ---------------------------------------------------------------- drawing


NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
TITLE_WIDTH = 90  # letters
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "emad",  # otherwise ids are random
    "svg.fonttype": "none",  # text stays text, so it can be searched and read aloud
    "text.parse_math": False,  # a $ in a model's name is a $
    "text.usetex": False,
}


class NoDrawableRows(EmadError):
    """Raised if every row lacks a number that the figure needs."""


def require_drawable(figure: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that ``rows`` have the columns that ``figure`` draws, with values of the right kind.

    Raises:
        BadArgument: an unknown figure, no rows, a column that is missing, a value of another kind.
    """
    if figure not in FIGURES:
        raise BadArgument("figure", figure, f"one of {', '.join(FIGURES)}")
    if not rows:
        raise BadArgument("rows", rows, "at least one row", "there is nothing to draw")
    spec = FIGURES[figure]
    for column in (*spec.texts, *spec.numbers, *spec.gaps, *spec.lists):
        for number, row in enumerate(rows):
            if column not in row:
                raise BadArgument(f"columns of row {number}", list(row), f"{column!r}, which figure {figure!r} draws")
            value = row[column]
            if column in spec.lists:
                if not isinstance(value, list):
                    raise BadArgument(f"row {number}: {column}", value, "a list")
                continue
            if column in spec.texts and not isinstance(value, str):
                raise BadArgument(f"row {number}: {column}", value, "a text")
            if column not in spec.texts and not (value is None or is_number(value)):
                raise BadArgument(f"row {number}: {column}", value, "a number or None")


def render_figure_svg(figure: str, rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Text of an SVG file. It omits rows that lack a number, and the figure notes how many.

    Args:
        figure: a name of ``FIGURES``, whose entry lists its columns.
        rows: of one recorded table.
        title: above the figure.

    Raises:
        BadArgument: as ``require_drawable``.
        NoDrawableRows: every row lacks a number.
        MissingExtra: the extra ``report`` is not installed.
    """
    with open_figure(figure, rows, title) as canvas:
        file = io.BytesIO()
        canvas.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().decode()


@contextmanager
def open_figure(figure: str, rows: Sequence[Mapping[str, Any]], title: str) -> Iterator[Figure]:
    """Open the matplotlib figure while its style is active; raises as ``render_figure_svg`` does."""
    require_drawable(figure, rows)
    spec = FIGURES[figure]
    complete = _complete_rows(spec, rows)
    if not complete:
        lacking = [column for column in spec.numbers if all(row[column] is None for row in rows)]
        raise NoDrawableRows(f"no row has {' and '.join(lacking or spec.numbers)}")
    require_extra("a figure", "matplotlib")
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure  # no pyplot: no global state and no window

    with rc_context(), warnings.catch_warnings():
        rcdefaults()
        rcParams.update(STYLE)
        # the viewer renders the text, so missing glyphs on this machine do not matter
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        canvas = Figure(figsize=spec.size(complete), layout="constrained")
        spec.paint(canvas, [_printable(row) for row in complete])
        absent = len(rows) - len(complete)
        left_out = f"\n({absent} of {len(rows)} rows lack a number and are not drawn)" if absent else ""
        wrapped = textwrap.fill(NOT_XML.sub("\ufffd", title), TITLE_WIDTH)
        canvas.suptitle(wrapped + left_out, fontsize="medium")
        yield canvas


def _complete_rows(spec: FigureSpec, rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[column] is not None for column in spec.numbers)]


def _printable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace characters that XML forbids."""
    return {key: NOT_XML.sub("\ufffd", value) if isinstance(value, str) else value for key, value in row.items()}
