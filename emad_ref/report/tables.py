"""The tables of a run: operating points, claims and their legs, and whatever else suites put on record.

All take the JSON-able dictionaries of ``report.json`` and give rows of ``Cell``: a text beside the value that it shows.
Terminal, Markdown and HTML set the same rows, so that they cannot tell different stories. A value that is absent shows
as "–", never as zero. A falsified claim is one more row, set like every other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from emad_ref.report.figures import EMBEDDED
from emad_ref.report.fitting import Cell as Cell  # whoever takes rows takes them from here
from emad_ref.report.fitting import Row as Row
from emad_ref.report.fitting import text_table
from emad_ref.verdict import numbers
from emad_ref.verdict.gating import UNDECIDED
from emad_ref.verdict.numbers import ABSENT as ABSENT

WIDE = 150  # letters in a line where nobody says how wide the page is


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
            "depth": Cell(numbers.number(point.get("mean_depth"), ".2f"), point.get("mean_depth")),
            "P50/P90": Cell(
                f"{numbers.number(point.get('depth_p50'), 'g')}/{numbers.number(point.get('depth_p90'), 'g')}",
                [point.get("depth_p50"), point.get("depth_p90")],
            ),
            "FLOPs gross": Cell(numbers.saved(point.get("gross_reduction")), point.get("gross_reduction")),
            "net": Cell(numbers.saved(point.get("net_reduction")), point.get("net_reduction")),
            "end to end": Cell(numbers.saved(point.get("end_to_end_reduction")), point.get("end_to_end_reduction")),
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
        | {
            f"p {side}": Cell(numbers.number(leg[f"p_{side}"], ".2g"), leg[f"p_{side}"])
            for side in ("falsify", "survive")
        }
        for leg in legs
    ]


def _answer(found: Mapping[str, Any]) -> Row:
    """What verdicts and legs have in common."""
    unit = found["unit"]
    return {
        "estimate": Cell(numbers.value(found["estimate"], unit), found["estimate"]),
        "[95 %]": Cell(numbers.interval(found["interval"], unit), found["interval"]),
        "n": Cell(numbers.count(found["n"]), found["n"]),
        "threshold": Cell(numbers.value(found["threshold"], unit), found["threshold"]),
        "unit": Cell(unit),
        "reason": Cell(found["reason"]),
    }


def plain_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows that share their keys, as they stand; floats to four digits, a key that ends in " %" is a share in percent.

    Columns named "interval" hold [low, high].
    """
    return [{key: _cell(key, value) for key, value in row.items()} for row in rows]


def points_table(points: Sequence[Mapping[str, Any]], width: int = WIDE) -> str:
    """``point_rows`` for a terminal of ``width`` letters; an empty string for none."""
    return text_table(point_rows(points), width)


def claims_table(claims: Sequence[Mapping[str, Any]], width: int = WIDE) -> str:
    """``claim_rows`` for a terminal, where undecided ones that share a reason share a row; an empty string for none."""
    return text_table(claim_rows(_folded(claims)), width)


def plain_table(rows: Sequence[Mapping[str, Any]], width: int = WIDE) -> str:
    """``plain_rows`` for a terminal; an empty string for none."""
    return text_table(plain_rows(rows), width)


def sections(
    points: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, Any]],
    claims: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    width: int = WIDE,
) -> list[tuple[str, str]]:
    """(title, text) of all that a run has to show, in order; what is empty, or made for the page, is left out.

    ``tables``: ``{"title", "model", "rows"}`` each, as ``report.json`` holds them. ``width``: letters in a line.
    """
    found = [
        ("emad operating points", points_table(points, width)),
        *(
            (f"{table['model']}: {table['title']}", plain_table(table["rows"], width))
            for table in tables
            if table.get("figure") not in EMBEDDED
        ),
        ("emad claims", claims_table(claims, width)),
        ("emad notes", "\n".join(noted(note, width) for note in notes)),
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


def noted(note: str, width: int = WIDE) -> str:
    """A note as an item of a list."""
    return textwrap.fill(note, width, initial_indent="- ", subsequent_indent="  ", break_long_words=False)


def _cell(key: str, value: Any) -> Cell:
    text = _plain(key, value)
    return Cell(text, None if text == value else value)


def _plain(key: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain(key, part) for part in value)}]"
    if isinstance(value, float):
        percent = key.endswith(" %")
        scaled = 100 * value if percent else value
        # a percentage of a million and more is written with a power of ten, as `numbers.percent` writes it
        return f"{scaled:z.2f}" if percent and abs(value) < numbers.VAST else f"{scaled:z.4g}"
    return ABSENT if value is None else str(value)


def _perplexity(point: Mapping[str, Any]) -> str:
    reference, value = (point.get(key) for key in ("perplexity_reference", "perplexity"))
    return numbers.change(reference, value)


def _rise(point: Mapping[str, Any]) -> str:
    rise, interval = point.get("perplexity_rise"), point.get("interval")
    if rise is None or interval is None:
        return numbers.percent(rise)
    return f"{numbers.percent(rise)} {numbers.interval(interval, 'relative rise')}"


def _accuracies(point: Mapping[str, Any]) -> str:
    """One line per task, and below it why the task does not count, where it does not."""
    accuracy, why = point.get("accuracy"), point.get("not_counted") or {}
    if not accuracy:
        return ABSENT
    return "\n".join(
        f"{task} {numbers.change(reference, candidate, '.3f')}" + (f"\n({why[task]})" if task in why else "")
        for task, (reference, candidate) in accuracy.items()
    )


def _speeds(ratios: Mapping[str, float] | None) -> str:
    return "\n".join(f"batch {rows}: {numbers.ratio(ratio)}" for rows, ratio in ratios.items()) if ratios else ABSENT
