"""The tables of a run: operating points, claims and their legs, and whatever else suites put on record.

All take the JSON-able dictionaries of ``report.json`` and give rows of ``Cell``: a text beside the value that it shows.
Terminal, Markdown and HTML set the same rows, so that they cannot tell different stories. A value that is absent shows
as "–", never as zero. A falsified claim is one more row, set like every other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from emad_ref.report.figures import EMBEDDED
from emad_ref.verdict.gating import UNDECIDED

ABSENT = "–"
WIDTHS = {"claim": 16, "unit": 20, "reason": 44}  # keeps the claims table of the terminal within about 150 columns


@dataclass(frozen=True)
class Cell:
    """``text`` as shown, lines apart by newlines; ``value`` of ``report.json``, None where it is the text or absent."""

    text: str
    value: Any = None


Row = dict[str, Cell]


def point_rows(points: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per operating point.

    Keys, all optional but ``name``: ``model``, ``roles`` (why it is put forward), ``mean_depth``, ``depth_p50``,
    ``depth_p90``, ``gross_reduction`` and ``net_reduction`` (shares of decode FLOPs), ``end_to_end_reduction`` (of a
    timed request, its prompt included), ``perplexity_reference``, ``perplexity``, ``perplexity_rise`` with its
    ``interval`` (fractions), ``accuracy`` (task → [reference, candidate]), ``not_counted`` (task → why nothing is
    decided by it), ``time_ratio`` (batch size → full depth / adaptive).
    The model has a column where there are several.
    """
    several = len({point.get("model") for point in points}) > 1
    return [
        ({"model": Cell(point.get("model") or ABSENT)} if several else {})
        | {
            "point": Cell("\n".join([point["name"], *(point.get("roles") or ())]), point["name"]),
            "depth": Cell(_number(point.get("mean_depth"), ".2f"), point.get("mean_depth")),
            "P50/P90": Cell(
                f"{_number(point.get('depth_p50'), 'g')}/{_number(point.get('depth_p90'), 'g')}",
                [point.get("depth_p50"), point.get("depth_p90")],
            ),
            "FLOPs gross": Cell(_saved(point.get("gross_reduction")), point.get("gross_reduction")),
            "net": Cell(_saved(point.get("net_reduction")), point.get("net_reduction")),
            "end to end": Cell(_saved(point.get("end_to_end_reduction")), point.get("end_to_end_reduction")),
            "perplexity": Cell(_perplexity(point), [point.get("perplexity_reference"), point.get("perplexity")]),
            "rise [95 %]": Cell(_rise(point), [point.get("perplexity_rise"), point.get("interval")]),
            "accuracy": Cell(_accuracies(point), point.get("accuracy")),
            "speed": Cell(_speeds(point.get("time_ratio")), point.get("time_ratio")),
        }
        for point in points
    ]


def claim_rows(claims: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per verdict (``Verdict.to_json()``). The model shows where there are several.

    A ``*`` after the id marks a row that gates.
    """
    several = len({claim["model"] for claim in claims}) > 1
    return [
        {"claim": Cell(claim["id"] + ("*" if claim["gate"] else ""))}
        | ({"model": Cell(claim["model"])} if several else {})
        | {"verdict": Cell(claim["verdict"])}
        | _answer(claim)
        for claim in claims
    ]


def leg_rows(legs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per leg of a verdict (``Leg.to_json()``), with its unadjusted one-sided p-values."""
    return [
        {"leg": Cell(leg["name"]), "outcome": Cell(leg["outcome"])}
        | _answer(leg)
        | {f"p {side}": Cell(_number(leg[f"p_{side}"], ".2g"), leg[f"p_{side}"]) for side in ("falsify", "survive")}
        for leg in legs
    ]


def _answer(found: Mapping[str, Any]) -> Row:
    """What verdicts and legs have in common."""
    unit = found["unit"]
    return {
        "estimate": Cell(_value(found["estimate"], unit), found["estimate"]),
        "[95 %]": Cell(_interval(found["interval"], unit), found["interval"]),
        "n": Cell(f"{found['n']:,}" if found["n"] else ABSENT, found["n"]),
        "threshold": Cell(_value(found["threshold"], unit), found["threshold"]),
        "unit": Cell(unit),
        "reason": Cell(found["reason"]),
    }


def plain_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows that share their keys, as they stand; floats to four digits, a key that ends in " %" is a share in percent.

    Columns named "interval" hold [low, high].
    """
    return [{key: _cell(key, value) for key, value in row.items()} for row in rows]


def text_table(rows: Sequence[Row]) -> str:
    """Rows for a terminal, long columns wrapped; an empty string for none."""
    if not rows:
        return ""
    text = [
        {key: _filled(cell.text, WIDTHS[key]) if key in WIDTHS else cell.text for key, cell in row.items()}
        for row in rows
    ]
    table: str = tabulate(text, headers="keys", disable_numparse=True)
    return table


def points_table(points: Sequence[Mapping[str, Any]]) -> str:
    """``point_rows`` for a terminal; an empty string for none."""
    return text_table(point_rows(points))


def claims_table(claims: Sequence[Mapping[str, Any]]) -> str:
    """``claim_rows`` for a terminal, where undecided ones that share a reason share a row; an empty string for none."""
    return text_table(claim_rows(_folded(claims)))


def plain_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """``plain_rows`` for a terminal; an empty string for none."""
    return text_table(plain_rows(rows))


def sections(
    points: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, Any]],
    claims: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> list[tuple[str, str]]:
    """(title, text) of all that a run shows at its end, in order; what is empty, or made for the page, is left out.

    ``tables``: ``{"title", "model", "rows"}`` each, as ``report.json`` holds them.
    """
    found = [
        ("emad operating points", points_table(points)),
        *(
            (f"{table['model']}: {table['title']}", plain_table(table["rows"]))
            for table in tables
            if table.get("figure") not in EMBEDDED
        ),
        ("emad claims", claims_table(claims)),
        ("emad notes", "\n".join(f"- {note}" for note in notes)),
    ]
    return [(title, text) for title, text in found if text]


def _folded(claims: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Claims as given, but those of one model that do not gate and are undecided for one reason under joined ids."""
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for number, claim in enumerate(claims):
        alone = claim["gate"] or claim["verdict"] not in UNDECIDED
        groups.setdefault(number if alone else (claim["model"], claim["verdict"], claim["reason"]), []).append(claim)
    return [
        group[0] if len(group) == 1 else {**group[0], "id": ", ".join(claim["id"] for claim in group), "unit": ABSENT}
        for group in groups.values()
    ]


def _filled(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False)  # a claim's id stays in one piece


def _cell(key: str, value: Any) -> Cell:
    text = _plain(key, value)
    return Cell(text, None if text == value else value)


def _plain(key: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain(key, part) for part in value)}]"
    if isinstance(value, float):
        return f"{100 * value:z.2f}" if key.endswith(" %") else f"{value:z.4g}"
    return ABSENT if value is None else str(value)


# Units that read best in percent, and whether their sign is worth showing.
_FRACTIONS = {
    "relative rise": "+",
    "accuracy drop": "",
    "net FLOP reduction": "",
    "share of block FLOPs": "",
    "saving": "",
    "saving lost": "",
    "share of the score": "",
}


def _value(value: float | None, unit: str) -> str:
    return _percent(value, f"{_FRACTIONS[unit]}z.2f") if unit in _FRACTIONS else _number(value, ".4g")


def _interval(interval: Sequence[float] | None, unit: str) -> str:
    return ABSENT if interval is None else f"[{_value(interval[0], unit)}, {_value(interval[1], unit)}]"


def _number(value: float | None, form: str, suffix: str = "") -> str:
    return ABSENT if value is None else f"{value:{form}}{suffix}"


# "z" in the forms: a change that rounds to zero has no sign of its own, so "-0.0 %" never shows.
def _percent(share: float | None, form: str = "+z.2f") -> str:
    return ABSENT if share is None else f"{100 * share:{form}} %"


def _saved(reduction: float | None) -> str:
    """A reduction of 0.2 reads -20.0 %, as the FLOPs change."""
    return ABSENT if reduction is None else _percent(-reduction, "+z.1f")


def _perplexity(point: Mapping[str, Any]) -> str:
    reference, value = (point.get(key) for key in ("perplexity_reference", "perplexity"))
    return ABSENT if reference is None and value is None else f"{_number(reference, '.4g')} → {_number(value, '.4g')}"


def _rise(point: Mapping[str, Any]) -> str:
    rise, interval = point.get("perplexity_rise"), point.get("interval")
    if rise is None or interval is None:
        return _percent(rise)
    return f"{_percent(rise)} [{_percent(interval[0])}, {_percent(interval[1])}]"


def _accuracies(point: Mapping[str, Any]) -> str:
    """One line per task, and below it why the task does not count, where it does not."""
    accuracy, why = point.get("accuracy"), point.get("not_counted") or {}
    if not accuracy:
        return ABSENT
    return "\n".join(
        f"{task} {_number(reference, '.3f')} → {_number(candidate, '.3f')}"
        + (f"\n({why[task]})" if task in why else "")
        for task, (reference, candidate) in accuracy.items()
    )


def _speeds(ratios: Mapping[str, float] | None) -> str:
    return "\n".join(f"batch {rows}: {ratio:.2f}×" for rows, ratio in ratios.items()) if ratios else ABSENT
