"""Contents of a report, in order: the structure that the Markdown document and the HTML page both print.

First come counts of outcomes, and for several runs a table of claims by run. Then, run by run: claims with their legs,
operating points, recorded tables with figures, notes, goldens, settings and provenance. Outcomes are in the order of
``OUTCOMES``, claims in that of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_emad.report.depth_explorer import build_depth_explorers, build_pair_explorers, copy_intervals_to_margins
from pytest_emad.report.figures import EMBEDDED, FIGURES, FORWARD
from pytest_emad.report.known_gaps import describe_known_gaps
from pytest_emad.report.schema import Report
from pytest_emad.report.tables import (
    ABSENT,
    Cell,
    Row,
    claim_rows,
    leg_rows,
    lost_answer_rows,
    operating_point_rows,
    to_cell_rows,
)
from pytest_emad.statistics import number_format
from pytest_emad.statistics.gate import claim_title, format_measurement_and_requirement
from pytest_emad.statistics.verdicts import OUTCOMES, PAPERS, load_register

GATE_NOTE = "* the row gates: if it is falsified, the run fails"
PLAIN_OUTCOMES = {
    "survived": "holds",
    "falsified": "does not hold",
    "inconclusive": "cannot be told from this much data",
    "measured": "measured, nothing to decide",
    "not applicable": "does not apply here",
    "unmeasured": "was not measured",
}
TIME_RATIO_UNIT = "as fast"  # part of the unit of a ratio of times


@dataclass(frozen=True)
class PageFigure:
    """A figure of the page. ``svg`` is the text of the file named ``file`` ("" without a file).

    ``absent``: reason for no figure. A figure with a ``caption`` opens the page.
    """

    heading: str
    file: str = ""
    svg: str = ""
    absent: str = ""
    caption: str = ""


# one dictionary per run: table number, or model name for the cost-and-quality figure → figure
PageFigures = Sequence[Mapping[int | str, PageFigure]]


@dataclass(frozen=True)
class ClaimEntry:
    """One claim: its row, its sentence, its place in the paper, and its legs.

    ``title`` and ``paper`` are "" if the register lacks the row; ``link`` is the paper's (id, address), if it has one.
    """

    name: str
    title: str
    paper: str
    link: tuple[str, str] | None
    row: Row
    legs: list[Row]
    verdict: str


@dataclass(frozen=True)
class PageRun:
    """One ``report.json``. ``tables`` have heading, rows and figure; the other lists are rows of tables.

    ``overview``, ``figures``, ``explorers``, ``pair_texts`` and ``timings`` are shown on the page only.
    """

    name: str
    overview: dict[str, Any]
    figures: list[PageFigure]
    explorers: list[dict[str, Any]]
    pair_texts: list[dict[str, Any]]
    timings: list[Row]
    claims: list[ClaimEntry]
    points: list[Row]
    lost_answers: list[Row]
    tables: list[tuple[str, list[Row], PageFigure | None]]
    notes: list[str]
    goldens: list[Row]
    models: list[Row]
    settings: list[Row]
    provenance: list[Row]


@dataclass(frozen=True)
class ReportContents:
    """``counts``: one row per run, outcomes in columns. ``overview``: claims × runs; empty for a single run."""

    title: str
    counts: list[Row]
    overview: list[Row]
    runs: list[PageRun]


def build_report_contents(reports: Sequence[Report], figures: PageFigures) -> ReportContents:
    """Contents of one report or several; ``figures`` as ``page.render_figures_and_remark`` returns them."""
    names = _run_names(reports)
    return ReportContents(
        title=f"Verdicts on {', '.join(dict.fromkeys(names))}",
        counts=[_outcome_counts(name, report) for name, report in zip(names, reports, strict=True)],
        overview=_claims_by_run(names, reports) if len(reports) > 1 else [],
        runs=[
            _page_run(name, copy_intervals_to_margins(report), drawn)
            for name, report, drawn in zip(names, reports, figures, strict=True)
        ],
    )


def _run_names(reports: Sequence[Report]) -> list[str]:
    """A run is named by its models; runs of the same models are numbered."""
    plain = [", ".join(model["name"] for model in report["models"]) or "no model" for report in reports]
    return [
        name if plain.count(name) == 1 else f"{name} ({plain[: place + 1].count(name)})"
        for place, name in enumerate(plain)
    ]


def _outcome_counts(name: str, report: Report) -> Row:
    outcomes = [claim["verdict"] for claim in report["claims"]]
    counts = {outcome: outcomes.count(outcome) for outcome in OUTCOMES}
    return {"run": Cell(name)} | {outcome: Cell(str(count), count) for outcome, count in counts.items()}


def _claims_by_run(names: Sequence[str], reports: Sequence[Report]) -> list[Row]:
    """Each claim's verdict in each run, with the name of its model unless the run has only that one."""
    ids = dict.fromkeys(claim["id"] for report in reports for claim in report["claims"])
    runs = list(zip(names, reports, strict=True))
    return [{"claim by run": Cell(id)} | {name: Cell(_verdict_text(id, report)) for name, report in runs} for id in ids]


def _verdict_text(id: str, report: Report) -> str:
    verdicts = [claim for claim in report["claims"] if claim["id"] == id]
    own = [model["name"] for model in report["models"]]
    if len(own) == 1 and [claim["model"] for claim in verdicts] == own:
        return str(verdicts[0]["verdict"])
    return "\n".join(f"{claim['model']}: {claim['verdict']}" for claim in verdicts) or ABSENT


def _page_run(name: str, report: Report, figures: Mapping[int | str, PageFigure]) -> PageRun:
    return PageRun(
        name=name,
        overview=build_run_overview(report),
        figures=sorted((one for one in figures.values() if one.caption), key=lambda one: bool(one.file)),
        explorers=build_depth_explorers(report),
        pair_texts=build_pair_explorers(report),
        timings=timing_rows(report),
        claims=_claim_entries(report["claims"]),
        points=operating_point_rows(report["points"]),
        lost_answers=lost_answer_rows(report["points"]),
        tables=[
            (f"{table['model']}: {table['title']}", to_cell_rows(_without_lists(table)), figures.get(number))
            for number, table in enumerate(report["tables"])
        ],
        notes=list(report["notes"]),
        goldens=to_cell_rows([{"golden": entry["id"], "outcome": entry["outcome"]} for entry in report["goldens"]]),
        models=[row for model in report["models"] for row in _fact_rows(model, f"{model['name']}: ", ("name",))],
        settings=_fact_rows(report["settings"]),
        provenance=[*_run_facts(report), *_fact_rows(report["provenance"])],
    )


# ---------------------------------------------------------------- start of the page


def build_run_overview(report: Report) -> dict[str, Any]:
    """Overview of a run: outcome, decoder, models, state, failures, waivers, gates, counts of other rows."""
    from pytest_emad.report.summary import build_run_summary, split_claims_by_gate

    register, brief = load_register(), build_run_summary(report)
    gating, rest = split_claims_by_gate(report)
    ungated = [claim["verdict"] for claim in rest]
    return {
        "headline": brief.headline,
        "tone": {True: "good", False: "bad", None: ""}[brief.passed],
        "broken": [f"{cause.text}. {cause.first}" if cause.first else cause.text for cause in brief.broken],
        "repeat": brief.repeat,
        "unknown": brief.unknown,
        "decoder": _decoder_text(report["decoder"]),
        "models": [_model_text(model) for model in report["models"]],
        "state": _state_text(report),
        "failures": report["run"]["failures"],
        "waivers": [_waiver_text(waiver) for waiver in report["waivers"]],
        "known_gaps": list(describe_known_gaps(report)),
        "gates": [
            {
                "title": claim_title(claim, register),
                "plain": PLAIN_OUTCOMES[claim["verdict"]],
                "found": format_measurement_and_requirement(claim),
            }
            | {key: claim[key] for key in ("id", "model", "verdict", "reason")}
            for claim in gating
        ],
        "ungated": [(each, PLAIN_OUTCOMES[each], ungated.count(each)) for each in OUTCOMES if each in ungated],
    }


def _model_text(model: Mapping[str, Any]) -> str:
    facts = [f"{model['layers']} layers"] if "layers" in model else []
    facts += [str(model[key]) for key in ("family", "dtype", "device") if isinstance(model.get(key), str)]
    return f"{model['name']} ({', '.join(facts)})" if facts else str(model["name"])


def _decoder_text(decoder: Mapping[str, Any]) -> str:
    return str(decoder["name"]) if decoder["foreign"] else "the reference decoder of this package"


def _state_text(report: Report) -> str:
    status = report["run"]["exit_status"]
    ended = "" if status is None else ", exit status 0: nothing failed" if status == 0 else f", exit status {status}"
    return f"{report['state']}{ended}"


def _waiver_text(waiver: Mapping[str, Any]) -> str:
    return f"{waiver['of']}: {waiver['reason']}" + ("" if waiver["needed"] else " (not needed in this run)")


def cost_quality_rows(report: Report, model: str) -> list[dict[str, Any]]:
    """Rows of the figure "cost against quality": EMAD by margin, the selected points, each family's best points.

    Families come from the first Pareto table only; later tables are about other text.
    """
    from emad_ref.exit_rules import EMAD_FAMILY  # imports NumPy, so only on demand

    def tables_of(figure: str) -> list[Mapping[str, Any]]:
        return [table for table in report["tables"] if (table.get("figure"), table["model"]) == (figure, model)]

    rows = [{"series": "EMAD, by margin", **row} for table in tables_of("depth by margin") for row in table["rows"]]
    for point in report["points"]:
        if point["model"] == model:
            low, high = point.get("interval") or (None, None)
            quality = {"net reduction %": point.get("net_reduction"), "rise %": point.get("perplexity_rise")}
            rows.append({"series": FORWARD, **quality, "rise low %": low, "rise high %": high})
    for table in tables_of("pareto")[:1]:
        own = [row for row in table["rows"] if row["family"] != EMAD_FAMILY]
        rows += [{"series": row["family"], **row} for row in own]
    columns = ("series", "net reduction %", "rise %", "rise low %", "rise high %")
    chosen = [{column: row.get(column) for column in columns} for row in rows]
    return [row for row in chosen if row["net reduction %"] is not None and row["rise %"] is not None]


def timing_rows(report: Report) -> list[Row]:
    """One row for each timed leg of every verdict, in the order of the report."""
    return [
        {
            "timed": Cell(leg["name"]),
            "times as fast": Cell(
                number_format.format_value(leg["estimate"], leg["unit"], leg["interval"]), leg["estimate"]
            ),
            "[95 %]": Cell(number_format.format_interval(leg["interval"], leg["unit"]), leg["interval"]),
            "pairs": Cell(number_format.format_count_or_dash(leg["n"]), leg["n"]),
            "outcome": Cell(leg["outcome"]),
            "claim": Cell(claim["id"]),
            "model": Cell(claim["model"]),
        }
        for claim in report["claims"]
        for leg in claim["legs"]
        if TIME_RATIO_UNIT in leg["unit"] and leg["estimate"] is not None
    ]


# ---------------------------------------------------------------- the parts of a run


def _without_lists(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table; an embedded table drops its list columns, which have no cell."""
    left_out = FIGURES[table["figure"]].lists if table.get("figure") in EMBEDDED else ()
    return [{key: value for key, value in row.items() if key not in left_out} for row in table["rows"]]


def _claim_entries(claims: Sequence[Mapping[str, Any]]) -> list[ClaimEntry]:
    register = load_register()
    return [
        ClaimEntry(
            name=f"{claim['id']} on {claim['model']}",
            title=register[claim["id"]].title if claim["id"] in register else "",
            paper=(paper := register[claim["id"]].paper if claim["id"] in register else ""),
            link=next((link for name, link in PAPERS.items() if name in re.findall(r"[\w-]+(?: LLMs)?", paper)), None),
            row=row,
            legs=leg_rows(claim["legs"]),
            verdict=claim["verdict"],
        )
        for claim, row in zip(claims, claim_rows(claims), strict=True)
    ]


def _run_facts(report: Report) -> list[Row]:
    """State, decoder, command, failures and waivers of a run."""
    run = report["run"]
    return _fact_rows(
        {"state": report["state"], "decoder": report["decoder"]["name"]}
        | {key: run[key] for key in ("started", "duration_s", "command", "exit_status", "failures")}
        | {"waivers": [f"{waiver['of']}: {waiver['reason']}" for waiver in report["waivers"]]}
    )


def _fact_rows(facts: Mapping[str, Any], prefix: str = "", left_out: Sequence[str] = ()) -> list[Row]:
    return [
        {"name": Cell(f"{prefix}{key}"), "value": _fact_cell(value)}
        for key, value in facts.items()
        if key not in left_out
    ]


def _fact_cell(value: Any) -> Cell:
    if isinstance(value, dict):
        return Cell("\n".join(f"{key} {_value_text(part)}" for key, part in value.items()) or ABSENT, value)
    text = ", ".join(map(_value_text, value)) or ABSENT if isinstance(value, list) else _value_text(value)
    return Cell(text, None if text == value else value)


def _value_text(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
