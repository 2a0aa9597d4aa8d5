"""What a report shows, in order: one structure that the Markdown document and the HTML page both set.

Verdicts first: how many of each outcome, and, of several runs, which run gave which claim which outcome. Then, run by
run, the claims with their legs, operating points, other tables with their figures, notes, goldens and where all of it
comes from. Outcomes stand in the order of ``OUTCOMES``, claims in the order of the run: nothing is sorted by merit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emad_ref.report.charts import Chart, charts
from emad_ref.report.figures import EMBEDDED, FIGURES
from emad_ref.report.opening import Opening, opening
from emad_ref.report.passages import Explorer, Turns, explorers, turns
from emad_ref.report.reading import Report
from emad_ref.report.tables import ABSENT, Cell, Row, claim_rows, leg_rows, plain_rows, point_rows
from emad_ref.report.timings import Strip, timings
from emad_ref.verdict.claims import OUTCOMES, load_register

STARRED = "* the row gates: where it is falsified, the run fails"


@dataclass(frozen=True)
class Figure:
    """``file`` its name in the report's folder and ``svg`` its text, both empty where ``absent`` says why."""

    file: str = ""
    svg: str = ""
    absent: str = ""


# One dictionary per run: number of the table → its figure.
Figures = Sequence[Mapping[int, Figure]]


@dataclass(frozen=True)
class Table:
    """A recorded table and, where one was asked for, its figure."""

    heading: str
    rows: list[Row]
    figure: Figure | None = None


@dataclass(frozen=True)
class ClaimEntry:
    """One claim: its row, its sentence ("" for a row that this version's register does not have) and its legs.

    ``absent``: it does not apply to this model or text.
    """

    name: str
    title: str
    row: Row
    legs: list[Row]
    absent: bool


@dataclass(frozen=True)
class Run:
    """One ``report.json``. ``models``, ``settings`` and ``provenance`` are rows of a name and a value.

    ``opening``, ``charts``, ``explorers``, ``turns`` and ``timings`` are what only a page can set.
    """

    name: str
    opening: Opening
    charts: list[Chart]
    explorers: list[Explorer]
    turns: list[Turns]
    timings: list[Strip]
    claims: list[ClaimEntry]
    points: list[Row]
    tables: list[Table]
    notes: list[str]
    goldens: list[Row]
    models: list[Row]
    settings: list[Row]
    provenance: list[Row]


@dataclass(frozen=True)
class Contents:
    """``counts``: one row per run, outcomes in columns. ``overview``: claims × runs; empty for a single run."""

    title: str
    counts: list[Row]
    overview: list[Row]
    runs: list[Run]


def contents(reports: Sequence[Report], figures: Figures) -> Contents:
    """Lay out one report or several; ``figures`` as ``folder.draw_figures`` gives them."""
    names = _names(reports)
    return Contents(
        title=f"Verdicts on {', '.join(dict.fromkeys(names))}",
        counts=[_counted(name, report) for name, report in zip(names, reports, strict=True)],
        overview=_overview(names, reports) if len(reports) > 1 else [],
        runs=[_run(*each) for each in zip(names, reports, figures, strict=True)],
    )


def _names(reports: Sequence[Report]) -> list[str]:
    """A run is named by its models; runs of the same models are numbered."""
    plain = [", ".join(model["name"] for model in report["models"]) or "no model" for report in reports]
    return [
        name if plain.count(name) == 1 else f"{name} ({plain[: place + 1].count(name)})"
        for place, name in enumerate(plain)
    ]


def _counted(name: str, report: Report) -> Row:
    found = [claim["verdict"] for claim in report["claims"]]
    counts = {outcome: found.count(outcome) for outcome in OUTCOMES}
    return {"run": Cell(name)} | {outcome: Cell(str(count), count) for outcome, count in counts.items()}


def _overview(names: Sequence[str], reports: Sequence[Report]) -> list[Row]:
    """Per claim what each run says, and of which models where not of the run's own: of a pair, of several."""
    ids = dict.fromkeys(claim["id"] for report in reports for claim in report["claims"])
    runs = list(zip(names, reports, strict=True))
    return [{"claim by run": Cell(id)} | {name: Cell(_said(id, report)) for name, report in runs} for id in ids]


def _said(id: str, report: Report) -> str:
    asked = [claim for claim in report["claims"] if claim["id"] == id]
    own = [model["name"] for model in report["models"]]
    if len(own) == 1 and [claim["model"] for claim in asked] == own:
        return str(asked[0]["verdict"])
    return "\n".join(f"{claim['model']}: {claim['verdict']}" for claim in asked) or ABSENT


def _run(name: str, report: Report, figures: Mapping[int, Figure]) -> Run:
    return Run(
        name=name,
        opening=opening(report),
        charts=charts(report),
        explorers=explorers(report),
        turns=turns(report),
        timings=timings(report),
        claims=_claims(report["claims"]),
        points=point_rows(report["points"]),
        tables=[
            Table(f"{table['model']}: {table['title']}", plain_rows(_without_lists(table)), figures.get(number))
            for number, table in enumerate(report["tables"])
        ],
        notes=list(report["notes"]),
        goldens=plain_rows([{"golden": entry["id"], "outcome": entry["outcome"]} for entry in report["goldens"]]),
        models=[row for model in report["models"] for row in _facts(model, f"{model['name']}: ", ("name",))],
        settings=_facts(report["settings"]),
        provenance=[*_run_facts(report), *_facts(report["provenance"])],
    )


def _without_lists(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows as they stand, but of a table made for the page without columns of lists, which are no cells."""
    left_out = FIGURES[table["figure"]].lists if table.get("figure") in EMBEDDED else ()
    return [{key: value for key, value in row.items() if key not in left_out} for row in table["rows"]]


def _claims(claims: Sequence[Mapping[str, Any]]) -> list[ClaimEntry]:
    register = load_register()
    return [
        ClaimEntry(
            name=f"{claim['id']} on {claim['model']}",
            title=register[claim["id"]].title if claim["id"] in register else "",
            row=row,
            legs=leg_rows(claim["legs"]),
            absent=claim["verdict"] == "not applicable",
        )
        for claim, row in zip(claims, claim_rows(claims), strict=True)
    ]


def _run_facts(report: Report) -> list[Row]:
    """What schema 2 says of the run, in a few rows: whose decoder, which state, what was left undecided and why."""
    if report["schema"] == 1:
        return []
    run = report["run"]
    return _facts(
        {"state": report["state"], "decoder": report["decoder"]["name"]}
        | {key: run[key] for key in ("started", "duration_s", "command", "exit_status", "failures")}
        | {"waivers": [f"{waiver['of']}: {waiver['reason']}" for waiver in report["waivers"]]}
    )


def _facts(facts: Mapping[str, Any], prefix: str = "", left_out: Sequence[str] = ()) -> list[Row]:
    return [
        {"name": Cell(f"{prefix}{key}"), "value": _fact(value)} for key, value in facts.items() if key not in left_out
    ]


def _fact(value: Any) -> Cell:
    if isinstance(value, dict):
        return Cell("\n".join(f"{key} {_text(part)}" for key, part in value.items()) or ABSENT, value)
    text = ", ".join(map(_text, value)) or ABSENT if isinstance(value, list) else _text(value)
    return Cell(text, None if text == value else value)


def _text(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
