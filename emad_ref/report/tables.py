"""The two tables of a run: operating points and claims, as plain text.

Both take the JSON-able dictionaries of ``report.json``, so that terminal and report cannot tell different stories. A
value that is absent shows as "–", never as zero. A falsified claim is one more row, set like every other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

ABSENT = "–"
REASON_WIDTH = 44  # keeps the claims table within about 150 columns


def points_table(points: Sequence[Mapping[str, Any]]) -> str:
    """One line per operating point; an empty string for none.

    Keys, all optional but ``name``: ``model``, ``mean_depth``, ``depth_p50``, ``depth_p90``, ``gross_reduction`` and
    ``net_reduction`` (shares of decode FLOPs), ``end_to_end_reduction`` (of a timed request, its prompt included),
    ``perplexity_reference``, ``perplexity``, ``perplexity_rise`` with its ``interval`` (fractions), ``accuracy``
    (task → [reference, candidate]), ``time_ratio`` (batch size → full depth / adaptive).
    The model has a column where there are several.
    """
    if not points:
        return ""
    several = len({point.get("model") for point in points}) > 1
    rows = []
    for point in points:
        model = {"model": point.get("model") or ABSENT} if several else {}
        rows.append(
            model
            | {
                "point": str(point["name"]),
                "depth": _number(point.get("mean_depth"), ".2f"),
                "P50/P90": f"{_number(point.get('depth_p50'), 'g')}/{_number(point.get('depth_p90'), 'g')}",
                "FLOPs gross": _saved(point.get("gross_reduction")),
                "net": _saved(point.get("net_reduction")),
                "end to end": _saved(point.get("end_to_end_reduction")),
                "perplexity": _perplexity(point),
                "rise [95 %]": _rise(point),
                "accuracy": _accuracies(point.get("accuracy")),
                "speed": _speeds(point.get("time_ratio")),
            }
        )
    table: str = tabulate(rows, headers="keys", disable_numparse=True)
    return table


def claims_table(claims: Sequence[Mapping[str, Any]]) -> str:
    """One line per verdict (``Verdict.to_json()``); an empty string for none. The model shows where there are several.

    A ``*`` after the id marks a row that gates.
    """
    if not claims:
        return ""
    several = len({claim["model"] for claim in claims}) > 1
    rows = []
    for claim in claims:
        model = {"model": claim["model"]} if several else {}
        rows.append(
            {"claim": claim["id"] + ("*" if claim["gate"] else "")}
            | model
            | {
                "verdict": claim["verdict"],
                "estimate": _value(claim["estimate"], claim["unit"]),
                "[95 %]": _interval(claim["interval"], claim["unit"]),
                "n": f"{claim['n']:,}" if claim["n"] else ABSENT,
                "threshold": _value(claim["threshold"], claim["unit"]),
                "unit": textwrap.fill(claim["unit"], 20),
                "reason": textwrap.fill(claim["reason"], REASON_WIDTH),
            }
        )
    table: str = tabulate(rows, headers="keys", disable_numparse=True)
    return table


def plain_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows that share their keys, as they stand; floats to four digits, a key that ends in " %" is a share in percent.

    Columns named "interval" hold [low, high].
    """
    if not rows:
        return ""
    text = [{key: _cell(key, value) for key, value in row.items()} for row in rows]
    table: str = tabulate(text, headers="keys", disable_numparse=True)
    return table


def _cell(key: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_cell(key, part) for part in value)}]"
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


def _accuracies(accuracy: Mapping[str, Sequence[float | None]] | None) -> str:
    if not accuracy:
        return ABSENT
    return "\n".join(
        f"{task} {_number(reference, '.3f')} → {_number(candidate, '.3f')}"
        for task, (reference, candidate) in accuracy.items()
    )


def _speeds(ratios: Mapping[str, float] | None) -> str:
    return "\n".join(f"batch {rows}: {ratio:.2f}×" for rows, ratio in ratios.items()) if ratios else ABSENT
