"""Judge a model and read reports from Python: results as pandas frames, figures as matplotlib axes.

    results = pytest_emad.judge("emad-tiny", only=["EMAD-E1"])  # as `emad judge`
    results = pytest_emad.read_report("report/")                # the report of `pytest --emad-report report/`
    results.claims; results.legs; results.points; results.lost_answers
    results.tables["emad-tiny: readouts by layer on world:premise"]
    pytest_emad.plot_profile(results)

pandas and matplotlib (extra ``report``) are imported on first use.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from emad_ref.console import format_facts_html
from emad_ref.errors import BadArgument, EmadError, require_extra, require_instance
from pytest_emad.report import figures, schema
from pytest_emad.report.contents import cost_quality_rows
from pytest_emad.statistics.units import format_unit_count

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

DECIDED_STATUSES = (0, 1)  # of a pytest that reached its verdicts


@dataclass(frozen=True, repr=False)
class RunResults:
    """A report as pandas frames.

    Attributes
    ----------
    report : dict
        Content of ``report.json``.
    """

    report: schema.Report

    @property
    def headline(self) -> str:
        """Passed or failed with the reason: the first line of the run's summary."""
        from pytest_emad.report.summary import build_run_summary

        return build_run_summary(self.report).headline

    @cached_property
    def claims(self) -> pandas.DataFrame:
        """One row per verdict, as ``Verdict`` names its fields; ``low`` and ``high`` bound the 95 % interval."""
        return _frame(_with_bounds(claim) for claim in self.report["claims"])

    @cached_property
    def legs(self) -> pandas.DataFrame:
        """One row per leg of every verdict, with the ``claim`` and ``model`` that it belongs to."""
        return _frame(
            {"claim": claim["id"], "model": claim["model"], **_with_bounds(leg)}
            for claim in self.report["claims"]
            for leg in claim["legs"]
        )

    @cached_property
    def points(self) -> pandas.DataFrame:
        """One row per operating point: cost, quality, depth. Rises and reductions are fractions."""
        return _frame(map(_with_bounds, self.report["points"]))

    @cached_property
    def lost_answers(self) -> pandas.DataFrame:
        """One row per shown item that full depth answers right and a point does not, with both answers."""
        return _frame(
            {"model": point["model"], "point": point["name"], "task": task, **one}
            for point in self.report["points"]
            for task, lost in (point.get("lost_answers") or {}).items()
            for one in lost["first"]
        )

    @cached_property
    def tables(self) -> dict[str, pandas.DataFrame]:
        """``MODEL: TITLE`` → rows of that table. Columns that end in % hold fractions."""
        return {f"{table['model']}: {table['title']}": _frame(table["rows"]) for table in self.report["tables"]}

    def __repr__(self) -> str:
        models = ", ".join(self.report["settings"]["models"])
        parts = ", ".join(format_unit_count(len(self.report[what]), what) for what in ("claims", "tables"))
        return f"{type(self).__name__}({models}: {self.headline}; {parts})"

    def _repr_html_(self) -> str:
        from pytest_emad.report.summary import build_run_summary

        causes = {
            f"failed tests, cause {n}": cause.text
            for n, cause in enumerate(build_run_summary(self.report).broken, start=1)
        }
        verdicts = {
            f"{claim['id']} on {claim['model']}": f"{claim['verdict']}: {claim['title']}"
            for claim in self.report["claims"]
        }
        return format_facts_html(self.headline, causes | verdicts)


def _frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    require_extra("a frame of results", "pandas")
    import pandas

    return pandas.DataFrame([dict(row) for row in rows])


def _with_bounds(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry without its legs, with its interval in two columns."""
    low, high = entry.get("interval") or (None, None)
    return {key: value for key, value in entry.items() if key not in ("interval", "legs")} | {"low": low, "high": high}


def read_report(place: str | Path) -> RunResults:
    """Read the report in the folder or file ``place``.

    Parameters
    ----------
    place : str or Path
        A folder that ``pytest --emad-report DIR`` wrote, or its ``report.json``.

    Returns
    -------
    RunResults

    Raises
    ------
    BadReport
        No report, a damaged one, or one of another schema; the message names the place.
    """
    require_instance("place", place, (str, Path), "name the folder of a report")
    return RunResults(schema.read_report(Path(place)))


def judge(model: str | Path, only: str | Sequence[str] = (), **options: Any) -> RunResults:
    """Judge a model by ``emad judge``, in a process of its own, and read its report.

    Parameters
    ----------
    model : str or Path
        A bundled name, a folder or a name of the hub.
    only : str or sequence of str
        Ids or patterns of claims such as ``EMAD-R*``, as a sequence or with commas between them; empty: the whole
        suites.
    **options
        Options of ``emad judge`` with underscores: ``corpus="wikitext"``, ``budget="standard"``, ``seed=1``. True sets
        an option without a value; None leaves one out. ``report`` keeps the report in that folder.

    Returns
    -------
    RunResults

    Raises
    ------
    BadArgument
        An option that ``emad judge`` does not have, or a value that it refuses.
    EmadError
        pytest could not run the suites: an unknown claim, a model or text that cannot be read.
    """
    from pytest_emad.cli import build_parser
    from pytest_emad.cli.judgment import build_pytest_arguments, run_pytest

    patterns = only if isinstance(only, str) else ",".join(only)
    words = ["judge", str(model), *([f"--only={patterns}"] if patterns else [])]
    for name, value in options.items():
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            args = build_parser().parse_args(words)
    except (SystemExit, EmadError) as error:
        refusal = str(error) if isinstance(error, EmadError) else said.getvalue().strip().partition("error: ")[2]
        raise BadArgument("options", options, "those of `emad judge --help`", refusal) from None
    with TemporaryDirectory(prefix="emad-judge-") as temporary:
        args.report = args.report or temporary
        done = run_pytest(build_pytest_arguments(args), capture_output=True, text=True)
        if done.returncode not in DECIDED_STATUSES:
            raise EmadError(f"pytest ended with status {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return read_report(args.report)


def _document_plot(plot: Callable[..., list[Axes]]) -> Callable[..., list[Axes]]:
    """Add the sections common to all plots to a docstring."""
    plot.__doc__ = f"""{plot.__doc__}

    Parameters
    ----------
    results : RunResults
        Of a run that made this figure's table.
    model : str, optional
        The model to plot; the first that has the figure by default.

    Returns
    -------
    list of matplotlib.axes.Axes

    Raises
    ------
    BadArgument
        Results without the table that the figure shows.
    """
    return plot


@_document_plot
def plot_profile(results: RunResults, model: str | None = None) -> list[Axes]:
    """Plot mean entropy after each layer, the targets of the probes, and the prediction by low entropy (EMAD-E1)."""
    return _plot(results, "entropy profile", model)


@_document_plot
def plot_depth_by_position(results: RunResults, model: str | None = None) -> list[Axes]:
    """Plot depth with and without the monotone schedule along the text."""
    return _plot(results, "depth by position", model)


@_document_plot
def plot_explorer(results: RunResults, model: str | None = None) -> list[Axes]:
    """Plot the depth of each token of one text at three margins."""
    return _plot(results, "depth by token", model)


@_document_plot
def plot_cost_against_quality(results: RunResults, model: str | None = None) -> list[Axes]:
    """Plot the rise of perplexity over net FLOPs saved."""
    names = [str(entry["name"]) for entry in results.report["models"]]
    rows = next(
        (rows for name in names if model in (None, name) and (rows := cost_quality_rows(results.report, name))), None
    )
    return _paint("cost against quality", _required("cost against quality", rows))


def _plot(results: RunResults, figure: str, model: str | None) -> list[Axes]:
    tables = (table for table in results.report["tables"] if table.get("figure") == figure)
    rows = next((table["rows"] for table in tables if model in (None, table["model"])), None)
    return _paint(figure, _required(figure, rows))


def _required(figure: str, rows: figures.Rows | None) -> figures.Rows:
    if not rows:
        remedy = "ask the claim that makes it, or read the report of a whole run"
        raise BadArgument("results", None, f"a table with the figure {figure!r}", remedy)
    return rows


def _paint(figure: str, rows: figures.Rows) -> list[Axes]:
    require_extra("a figure", "matplotlib")
    from matplotlib import pyplot

    drawn = figures.FIGURES[figure]
    canvas = pyplot.figure(figsize=drawn.size(rows), layout="constrained")
    drawn.paint(canvas, rows)
    return list(canvas.axes)
