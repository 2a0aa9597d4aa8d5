"""The figures of a report, drawn from the rows that ``report.json`` holds.

A figure is recognised by its columns: whoever records a table with the columns of a row of ``PLOTS`` gets the figure
beside it, and ``point_tables`` puts the operating points into the same form. Units stand in the column names; as in
``tables.plain_table``, a column that ends in " %" holds fractions.

``pareto``       net FLOP reduction against perplexity rise, one series per family (EMAD, "Experiments", Baselines).
``margin``       both against the margin m ("Margin m sensitivity curves").
``profile``      mean entropy by layer and the isotonic targets τ_ℓ at the probes ("Teacher-forcing entropy profile").
``position``     mean depth by position bucket, one series per operating point.
``exits``        share of tokens per depth, one bar per method.
``reliability``  confidence and accuracy by layer: where confidence lies above, the layer is overconfident (EE-5).
``rank``         rank of the final token by layer (EE-6).

Equal rows give equal bytes. Needs the extra ``report`` (matplotlib), imported when the first figure is drawn, and no
display. This module knows no model, computes no statistic and chooses no row: a row with an absent value is left out.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emad_ref.errors import BadArgument, EmadError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Rows = Sequence[Row]
Style = dict[str, Any]

# Okabe and Ito's colours, told apart with every common colour blindness; their yellow is too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v")  # 7 and 5 share no factor: 35 series before a pair repeats
# The same colour in every figure, whichever of them it shows.
FAMILIES = ("emad", "truncation", "fixed_entropy", "softmax_response", "full", "quantile")

USABLE_REDUCTION, TOLERATED_RISE = 0.15, 0.01  # EMAD, "Falsification criteria"
LINEAR_PERCENT = 1.0  # the rise axis is linear to ±1 %, logarithmic beyond: a wrong rule costs a thousand times a good


class ReportExtraMissing(EmadError):
    """What draws figures is not installed."""


@dataclass(frozen=True)
class Plot:
    """One kind of figure; ``columns`` are those its rows must have."""

    name: str
    title: str
    columns: tuple[str, ...]
    draw: Callable[[Axes, Rows], None]


def require_extra() -> None:
    """Raises ReportExtraMissing where matplotlib is not installed: for those who draw only after a long run."""
    try:
        import matplotlib.figure  # noqa: F401  # asked for its presence
    except ImportError as error:
        raise ReportExtraMissing(
            f"figures need the extra 'report' ({error}); pip install 'pytest-emad[report]'"
        ) from error


def plots_for(rows: Rows) -> list[Plot]:
    """The figures that ``rows`` can be drawn as: all their columns are there, and present together in some row."""
    return [plot for plot in PLOTS if _complete(plot, rows)]


def draw(plot: Plot, rows: Rows, title: str = "") -> Figure:
    """A figure of the complete ones among ``rows``; ``title`` stands above it, by default the plot's own.

    Raises:
        BadArgument: no row has all of ``plot.columns``.
        ReportExtraMissing: matplotlib is not installed.
    """
    complete = _complete(plot, rows)
    if not complete:
        raise BadArgument(f"rows of {plot.name}", list(rows)[:1], f"a row with {', '.join(plot.columns)}")
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 4.4), layout="constrained")  # no pyplot: no display, no global state
        axes = figure.add_subplot()
        axes.set_title(title or plot.title)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        plot.draw(axes, complete)
    return figure


def svg(figure: Figure) -> str:
    """The figure as SVG text, without date or program version."""
    return _saved(figure, "svg", {"Date": None, "Creator": None}).decode("utf-8")


def png(figure: Figure) -> bytes:
    """The figure as PNG, 150 dots per inch, without program version."""
    return _saved(figure, "png", {"Software": None}, dpi=150)


def point_tables(points: Rows) -> dict[str, list[dict[str, Any]]]:
    """Rows for ``pareto``, ``position`` and ``exits`` from the ``points`` of ``report.json``, under these names."""
    sweep = [
        {
            "family": point.get("family"),
            "point": point["name"],
            "net reduction %": point.get("net_reduction"),
            "perplexity rise %": point.get("perplexity_rise"),
            "interval": point.get("interval"),
        }
        for point in points
    ]
    position = [
        {"point": point["name"], "position": span, "mean depth (layers)": depth}
        for point in points
        for span, depth in (point.get("depth_by_position") or {}).items()
    ]
    exits = [
        {"method": point["name"], "layer": int(layer), "exits %": share}
        for point in points
        for layer, share in (point.get("depth_shares") or {}).items()
    ]
    return {"pareto": sweep, "position": position, "exits": exits}


# ------------------------------------------------------------ the figures


def _pareto(axes: Axes, rows: Rows) -> None:
    for family, style, members in _series(rows, "family"):
        ordered = sorted(members, key=lambda row: float(row["net reduction %"]))
        axes.plot(_percent(ordered, "net reduction %"), _percent(ordered, "perplexity rise %"), label=family, **style)
        bounded = [row for row in ordered if row.get("interval") is not None]
        low, high = ([100 * float(row["interval"][end]) for row in bounded] for end in (0, 1))
        axes.vlines(_percent(bounded, "net reduction %"), low, high, color=style["color"], linewidth=3, alpha=0.4)
    axes.axvline(100 * USABLE_REDUCTION, color="0.5", linestyle=":", linewidth=1)
    axes.axhline(100 * TOLERATED_RISE, color="0.5", linestyle=":", linewidth=1)
    axes.set_yscale("symlog", linthresh=LINEAR_PERCENT)
    axes.set_xlabel("net FLOP reduction (%); dotted: the paper's criterion")
    axes.set_ylabel("perplexity rise (%)")
    axes.legend(title="family")


def _margin(axes: Axes, rows: Rows) -> None:
    ordered = sorted(rows, key=lambda row: float(row["margin (nats)"]))
    margin = _column(ordered, "margin (nats)")
    saved, risen = _style(0), _style(1)
    axes.plot(margin, _percent(ordered, "net reduction %"), label="net FLOP reduction", **saved)
    axes.set_xlabel("margin m (nats)")
    axes.set_ylabel("net FLOP reduction (%)")
    right = axes.twinx()
    right.plot(margin, _percent(ordered, "perplexity rise %"), label="perplexity rise", **risen)
    right.set_yscale("symlog", linthresh=LINEAR_PERCENT)
    right.set_ylabel("perplexity rise (%)")
    handles = [axis.get_legend_handles_labels() for axis in (axes, right)]
    axes.legend(*(first + second for first, second in zip(*handles, strict=True)))


def _profile(axes: Axes, rows: Rows) -> None:
    for corpus, style, members in _series(rows, "corpus"):
        said = f", {corpus}" if corpus else ""
        targets = [row for row in members if row.get("target (nats)") is not None]
        axes.plot(
            _column(members, "layer"), _column(members, "mean entropy (nats)"), label=f"mean entropy{said}", **style
        )
        if targets:
            hollow = style | {"linestyle": "none", "markerfacecolor": "none", "markersize": 10}
            axes.plot(_column(targets, "layer"), _column(targets, "target (nats)"), label=f"target τ{said}", **hollow)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("entropy (nats)")
    axes.legend()


def _position(axes: Axes, rows: Rows) -> None:
    spans = list(dict.fromkeys(str(row["position"]) for row in rows))
    for point, style, members in _series(rows, "point"):
        at = [spans.index(str(row["position"])) for row in members]
        axes.plot(at, _column(members, "mean depth (layers)"), label=point, **style)
    axes.set_xticks(range(len(spans)), spans)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("mean depth (layers)")
    axes.legend()


def _exits(axes: Axes, rows: Rows) -> None:
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    deepest = max(int(row["layer"]) for row in rows)
    shade = ScalarMappable(Normalize(0, deepest), matplotlib.colormaps["viridis"])
    for place, method in enumerate(methods):
        left = 0.0
        for row in sorted((row for row in rows if row["method"] == method), key=lambda row: int(row["layer"])):
            width = 100 * float(row["exits %"])
            colour = shade.to_rgba(float(row["layer"]))
            axes.barh(place, width, left=left, color=colour, edgecolor="white", linewidth=0.5)
            left += width
    axes.set_yticks(range(len(methods)), methods)
    axes.invert_yaxis()
    axes.set_xlabel("share of tokens (%)")
    axes.get_figure(root=True).colorbar(shade, ax=axes, label="depth (layers)")  # type: ignore[union-attr]  # it has one


def _reliability(axes: Axes, rows: Rows) -> None:
    for number, column in enumerate(("confidence %", "accuracy %")):
        axes.plot(_column(rows, "layer"), _percent(rows, column), label=column.removesuffix(" %"), **_style(number))
    axes.set_ylim(0, 100)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of tokens, or mean top-1 probability (%)")
    axes.legend()


def _rank(axes: Axes, rows: Rows) -> None:
    for number, column in enumerate(("rank P50", "rank P90")):
        axes.plot(_column(rows, "layer"), _column(rows, column), label=column.removeprefix("rank "), **_style(number))
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("rank of the final token (1 = top)")
    axes.legend(title="quantile")


PLOTS: tuple[Plot, ...] = (
    Plot("pareto", "Quality against FLOPs", ("family", "net reduction %", "perplexity rise %"), _pareto),
    Plot("margin", "Margin sensitivity", ("margin (nats)", "net reduction %", "perplexity rise %"), _margin),
    Plot("profile", "Entropy profile under teacher forcing", ("layer", "mean entropy (nats)"), _profile),
    Plot("position", "Depth by position", ("point", "position", "mean depth (layers)"), _position),
    Plot("exits", "Exits per method", ("method", "layer", "exits %"), _exits),
    Plot("reliability", "Confidence and accuracy per layer", ("layer", "confidence %", "accuracy %"), _reliability),
    Plot("rank", "Rank of the final token per layer", ("layer", "rank P50", "rank P90"), _rank),
)


# ------------------------------------------------------------ shared by them


def _complete(plot: Plot, rows: Rows) -> list[Row]:
    return [row for row in rows if all(row.get(column) is not None for column in plot.columns)]


def _series(rows: Rows, column: str) -> Iterator[tuple[str, Style, list[Row]]]:
    """(name, style, rows) for each value of ``column``: known families first, then in order of appearance."""
    names = dict.fromkeys(str(row.get(column) or "") for row in rows)
    known = [name for name in FAMILIES if name in names]
    others = [name for name in names if name not in FAMILIES]
    first_free = len(FAMILIES) if known else 0
    styles = {name: FAMILIES.index(name) for name in known}
    styles |= {name: first_free + number for number, name in enumerate(others)}
    for name, number in styles.items():
        yield name, _style(number), [row for row in rows if str(row.get(column) or "") == name]


def _style(number: int) -> Style:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": ("-", "--", "-.")[number % 3],
    }


def _column(rows: Rows, column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def _percent(rows: Rows, column: str) -> list[float]:
    return [100 * value for value in _column(rows, column)]


@contextmanager
def _settings() -> Iterator[None]:
    """matplotlib's own defaults, whatever the user's file says, and ids from a fixed salt: equal rows, equal bytes."""
    require_extra()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "emad", "svg.fonttype": "none", "font.size": 10})
        yield


def _saved(figure: Figure, form: str, metadata: dict[str, None], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with _settings():
        figure.savefig(buffer, format=form, metadata=metadata, **options)
    return buffer.getvalue()
