"""What opens the page: whose decoder and which models, each gate in plain words, what else fails a run, and a count.

Timed arms as strips: how many times as fast, with the interval, on one scale on which 1 is no faster.

What a report shows, in order: one structure that the Markdown document and the HTML page both set.

Verdicts first: how many of each outcome, and, of several runs, which run gave which claim which outcome. Then, run by
run, the claims with their legs, operating points, other tables with their figures, notes, goldens and where all of it
comes from. Outcomes stand in the order of ``OUTCOMES``, claims in the order of the run: nothing is sorted by merit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emad_ref.report.depth_explorer import DepthExplorer, PairText, depth_explorers, pair_texts
from emad_ref.report.figures import EMBEDDED, FIGURES
from emad_ref.report.schema import Report
from emad_ref.report.svg_charts import Chart, charts
from emad_ref.report.tables import ABSENT, Cell, Row, claim_rows, claim_texts, leg_rows, plain_rows, point_rows
from emad_ref.statistics import number_format
from emad_ref.statistics.gate import title_of
from emad_ref.statistics.number_format import needed
from emad_ref.statistics.verdicts import OUTCOMES, load_register

PLAIN_OUTCOMES = {
    "survived": "holds",
    "falsified": "does not hold",
    "inconclusive": "cannot be told from this much data",
    "measured": "measured, nothing to decide",
    "not applicable": "does not apply here",
    "unmeasured": "was not measured",
}
REFERENCE_DECODER = "the reference decoder of this package"


@dataclass(frozen=True)
class GateCard:
    """``needs``: threshold and good side in words, "" where the row has none; the other fields are texts as shown."""

    claim: str
    model: str
    title: str
    verdict: str
    plain: str
    found: str
    interval: str
    needs: str
    unit: str
    reason: str


@dataclass(frozen=True)
class RunOverview:
    """``decoder`` and ``models`` in words; ``failures`` of the run as a whole; ``waivers``; ``rest``: of the rows that
    do not gate, how many of each outcome."""

    decoder: str
    models: list[str]
    state: str
    gates: list[GateCard]
    failures: list[str]
    waivers: list[str]
    rest: list[tuple[str, str, int]]


def run_overview(report: Report) -> RunOverview:
    """Of one run; a report of schema 1 says nothing of decoder, state, failures and waivers."""
    later = report["schema"] > 1
    return RunOverview(
        decoder=_decoder_text(report["decoder"]) if later else "",
        models=[_model_text(model) for model in report["models"]],
        state=_state_text(report) if later else "",
        gates=[gate_card(claim) for claim in report["claims"] if claim["gate"]],
        failures=list(report["run"]["failures"]) if later else [],
        waivers=[_waiver_text(waiver) for waiver in report["waivers"]] if later else [],
        rest=_ungated_counts(report["claims"]),
    )


def gate_card(claim: Mapping[str, Any]) -> GateCard:
    """One gating verdict."""
    register, said = load_register(), claim_texts(claim)
    return GateCard(
        claim=claim["id"],
        model=claim["model"],
        title=title_of(claim, register),
        verdict=claim["verdict"],
        plain=PLAIN_OUTCOMES[claim["verdict"]],
        found=said["estimate"],
        interval=said["[95 %]"],
        needs=needed(claim),
        unit=claim["unit"],
        reason=claim["reason"],
    )


def _model_text(model: Mapping[str, Any]) -> str:
    facts = [f"{model['layers']} layers"] if "layers" in model else []
    facts += [str(model[key]) for key in ("family", "dtype", "device") if isinstance(model.get(key), str)]
    return f"{model['name']} ({', '.join(facts)})" if facts else str(model["name"])


def _decoder_text(decoder: Mapping[str, Any]) -> str:
    return str(decoder["name"]) if decoder["foreign"] else f"{REFERENCE_DECODER} ({decoder['name']})"


def _state_text(report: Report) -> str:
    status = report["run"]["exit_status"]
    ended = "" if status is None else ", exit status 0: nothing failed" if status == 0 else f", exit status {status}"
    return f"{report['state']}{ended}"


def _waiver_text(waiver: Mapping[str, Any]) -> str:
    return f"{waiver['of']}: {waiver['reason']}" + ("" if waiver["needed"] else " (not needed in this run)")


def _ungated_counts(claims: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    found = [claim["verdict"] for claim in claims if not claim["gate"]]
    return [(outcome, PLAIN_OUTCOMES[outcome], found.count(outcome)) for outcome in OUTCOMES if outcome in found]


TIME_RATIO_UNIT = "as fast"  # in the unit of a ratio of times
STRIP_WIDTH = 220  # pixels of a strip


@dataclass(frozen=True)
class TimingStrip:
    """``at``, ``low``, ``high`` and ``one``, the place of 1, in pixels from the left; the last two absent without an
    interval. ``outcome`` of the leg."""

    claim: str
    model: str
    name: str
    outcome: str
    ratio: str
    interval: str
    pairs: str
    at: float
    low: float | None
    high: float | None
    one: float


def timing_strips(report: Report) -> list[TimingStrip]:
    """One for each timed leg of every verdict, in the order of the report."""
    legs = [
        (claim, leg)
        for claim in report["claims"]
        for leg in claim["legs"]
        if TIME_RATIO_UNIT in leg["unit"] and leg["estimate"] is not None
    ]
    known = [bound for _, leg in legs for bound in (leg["estimate"], *(leg["interval"] or ())) if bound is not None]
    most = 1.05 * max([1.0, *known])
    return [_timing_strip(claim, leg, most) for claim, leg in legs]


def _timing_strip(claim: Mapping[str, Any], leg: Mapping[str, Any], most: float) -> TimingStrip:
    def place(ratio: float | None) -> float | None:
        return None if ratio is None else round(STRIP_WIDTH * ratio / most, 1)

    low, high = leg["interval"] or (None, None)
    return TimingStrip(
        claim=claim["id"],
        model=claim["model"],
        name=leg["name"],
        outcome=leg["outcome"],
        ratio=number_format.ratio(leg["estimate"]),
        interval=number_format.interval(leg["interval"], leg["unit"]),
        pairs=number_format.count(leg["n"]),
        at=STRIP_WIDTH * leg["estimate"] / most,
        low=place(low),
        high=place(high),
        one=STRIP_WIDTH / most,
    )


GATE_NOTE = "* the row gates: where it is falsified, the run fails"


@dataclass(frozen=True)
class PageFigure:
    """``file`` its name in the report's folder and ``svg`` its text, both empty where ``absent`` says why."""

    file: str = ""
    svg: str = ""
    absent: str = ""


# One dictionary per run: number of the table → its figure.
PageFigures = Sequence[Mapping[int, PageFigure]]


@dataclass(frozen=True)
class PageTable:
    """A recorded table and, where one was asked for, its figure."""

    heading: str
    rows: list[Row]
    figure: PageFigure | None = None


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
class PageRun:
    """One ``report.json``. ``models``, ``settings`` and ``provenance`` are rows of a name and a value.

    ``opening``, ``charts``, ``explorers``, ``turns`` and ``timings`` are what only a page can set.
    """

    name: str
    opening: RunOverview
    charts: list[Chart]
    explorers: list[DepthExplorer]
    turns: list[PairText]
    timings: list[TimingStrip]
    claims: list[ClaimEntry]
    points: list[Row]
    tables: list[PageTable]
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


def report_contents(reports: Sequence[Report], figures: PageFigures) -> ReportContents:
    """Lay out one report or several; ``figures`` as ``page.draw_figures`` gives them."""
    names = _run_names(reports)
    return ReportContents(
        title=f"Verdicts on {', '.join(dict.fromkeys(names))}",
        counts=[_outcome_counts(name, report) for name, report in zip(names, reports, strict=True)],
        overview=_overview(names, reports) if len(reports) > 1 else [],
        runs=[_page_run(*each) for each in zip(names, reports, figures, strict=True)],
    )


def _run_names(reports: Sequence[Report]) -> list[str]:
    """A run is named by its models; runs of the same models are numbered."""
    plain = [", ".join(model["name"] for model in report["models"]) or "no model" for report in reports]
    return [
        name if plain.count(name) == 1 else f"{name} ({plain[: place + 1].count(name)})"
        for place, name in enumerate(plain)
    ]


def _outcome_counts(name: str, report: Report) -> Row:
    found = [claim["verdict"] for claim in report["claims"]]
    counts = {outcome: found.count(outcome) for outcome in OUTCOMES}
    return {"run": Cell(name)} | {outcome: Cell(str(count), count) for outcome, count in counts.items()}


def _overview(names: Sequence[str], reports: Sequence[Report]) -> list[Row]:
    """Per claim what each run says, and of which models where not of the run's own: of a pair, of several."""
    ids = dict.fromkeys(claim["id"] for report in reports for claim in report["claims"])
    runs = list(zip(names, reports, strict=True))
    return [{"claim by run": Cell(id)} | {name: Cell(_verdict_text(id, report)) for name, report in runs} for id in ids]


def _verdict_text(id: str, report: Report) -> str:
    asked = [claim for claim in report["claims"] if claim["id"] == id]
    own = [model["name"] for model in report["models"]]
    if len(own) == 1 and [claim["model"] for claim in asked] == own:
        return str(asked[0]["verdict"])
    return "\n".join(f"{claim['model']}: {claim['verdict']}" for claim in asked) or ABSENT


def _page_run(name: str, report: Report, figures: Mapping[int, PageFigure]) -> PageRun:
    return PageRun(
        name=name,
        opening=run_overview(report),
        charts=charts(report),
        explorers=depth_explorers(report),
        turns=pair_texts(report),
        timings=timing_strips(report),
        claims=_claim_entries(report["claims"]),
        points=point_rows(report["points"]),
        tables=[
            PageTable(f"{table['model']}: {table['title']}", plain_rows(_without_lists(table)), figures.get(number))
            for number, table in enumerate(report["tables"])
        ],
        notes=list(report["notes"]),
        goldens=plain_rows([{"golden": entry["id"], "outcome": entry["outcome"]} for entry in report["goldens"]]),
        models=[row for model in report["models"] for row in _fact_rows(model, f"{model['name']}: ", ("name",))],
        settings=_fact_rows(report["settings"]),
        provenance=[*_run_facts(report), *_fact_rows(report["provenance"])],
    )


def _without_lists(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows as they stand, but of a table made for the page without columns of lists, which are no cells."""
    left_out = FIGURES[table["figure"]].lists if table.get("figure") in EMBEDDED else ()
    return [{key: value for key, value in row.items() if key not in left_out} for row in table["rows"]]


def _claim_entries(claims: Sequence[Mapping[str, Any]]) -> list[ClaimEntry]:
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
