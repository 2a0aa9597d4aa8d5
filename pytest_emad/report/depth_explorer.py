"""Texts that the page shows token by token: one text at every margin (the depth explorer), and texts of a pair.

Both are built from ``report.figures.EMBEDDED`` tables. All texts are written here; the page's script only selects
among them. Lists that do not match their table are rejected as a whole, since they would colour the wrong token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emad_ref.errors import is_number, is_whole
from pytest_emad.report.schema import Report
from pytest_emad.statistics.number_format import ABSENT, format_digits, format_interval, format_percent, format_value

SHADES = 5  # shades of depth; 0 is the shallowest
STOP_NUMBERS = ("mean depth", "net FLOPs saved", "perplexity", "rise of perplexity", "95 % interval")
VISIBLE_SIGNS = {"\n": "↵\n", "\t": "→\t", "\r": "␍"}
TableRows = Sequence[Mapping[str, Any]]


def build_depth_explorers(report: Report) -> list[dict[str, Any]]:
    """One explorer for each model that has both tables with matching lists.

    ``stops``: name, roles and ``STOP_NUMBERS`` of each margin. ``tokens``: text, and per stop depth, shade and a
    sentence, all empty in a prompt. ``start``: the stop shown first. ``levels``: (shade, depths it stands for).
    """
    explorers = []
    for table in _tables_of(report, "depth by margin"):
        texts = [other for other in _tables_of(report, "depth by token") if other["model"] == table["model"]]
        if texts and has_matching_lists(table["rows"], texts[0]["rows"]):
            explorers.append(_depth_explorer(table, texts[0]["rows"]))
    return explorers


def copy_intervals_to_margins(report: Report) -> Report:
    """A copy of ``report`` whose tables of margins show the confidence intervals of its operating points.

    A margin that is an operating point was resampled twice, for the table and for its claim.
    """
    stated = {
        (point["model"], point.get("corpus"), point["margin_nats"]): point.get("interval")
        for point in report["points"]
        if point.get("margin_nats") is not None
    }

    def row_of(row: Mapping[str, Any], model: str) -> Mapping[str, Any]:
        bounds = stated.get((model, row["corpus"], row["margin, nats"]))
        return {**row, "rise low %": bounds[0], "rise high %": bounds[1]} if bounds else row

    tables = [
        {**table, "rows": [row_of(row, table["model"]) for row in table["rows"]]}
        if table.get("figure") == "depth by margin"
        else table
        for table in report["tables"]
    ]
    return {**report, "tables": tables}


def build_pair_explorers(report: Report) -> list[dict[str, Any]]:
    """One text for each table of a pair: title, pair, and for each token its text, its writer and a sentence."""
    return [
        {"title": table["title"], "pair": table["model"], "tokens": [_pair_token(row) for row in table["rows"]]}
        for table in _tables_of(report, "model by token")
    ]


def has_matching_lists(margins: TableRows, tokens: TableRows) -> bool:
    """Whether every decoded token has a depth ≥ 1 for every margin and an entropy for every probe."""
    probes = max(len(row["probes"]) for row in margins)
    decided = [row for row in tokens if row["depths"]]
    return (
        bool(decided)
        and all(
            len(row["depths"]) == len(row["instead"]) == len(margins)
            and len(row["entropy, nats"]) == probes
            and all(is_whole(depth) and depth > 0 for depth in row["depths"])
            and all(other is None or isinstance(other, str) for other in row["instead"])
            and _are_numbers(row["entropy, nats"])
            for row in decided
        )
        and all(_are_numbers(row["thresholds, nats"]) for row in margins)
    )


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(is_number(value) for value in values)


def _tables_of(report: Report, figure: str) -> list[Mapping[str, Any]]:
    return [table for table in report["tables"] if table.get("figure") == figure]


def _depth_explorer(table: Mapping[str, Any], tokens: TableRows) -> dict[str, Any]:
    margins = table["rows"]
    deepest = max(depth for row in tokens for depth in row["depths"])
    roles = [at for at, row in enumerate(margins) if row["put forward as"]]
    chosen = [at for at in roles if "validation" in margins[at]["put forward as"]]
    return {
        "title": table["title"],
        "model": table["model"],
        "start": (chosen or roles or [len(margins) // 2])[0],
        "levels": _shade_levels(deepest),
        "stops": [_margin_stop(row) for row in margins],
        "tokens": [
            {
                "text": make_whitespace_visible(row["token"]),
                "depth": row["depths"],
                "shade": [depth_shade_index(depth, deepest) for depth in row["depths"]],
                "said": [_token_text(row, at, margin) for at, margin in enumerate(margins)] if row["depths"] else [],
            }
            for row in tokens
        ],
    }


def _margin_stop(row: Mapping[str, Any]) -> dict[str, Any]:
    low, high = row["rise low %"], row["rise high %"]
    bounds = None if low is None or high is None else (low, high)
    numbers = [
        f"{format_digits(row['mean depth'], '.2f')} layers",
        format_percent(row["net reduction %"], "z.1f"),
        format_digits(row["perplexity"]),
        format_value(row["rise %"], "relative rise", bounds),
        format_interval(bounds, "relative rise"),
    ]
    return {"name": row["point"], "roles": row["put forward as"], "dials": numbers}


def _token_text(row: Mapping[str, Any], at: int, margin: Mapping[str, Any]) -> str:
    """Depth of one token at one margin, each probe's entropy and threshold, and the token that the exit would emit."""
    compared = [
        f"layer {probe}: entropy {format_digits(entropy, 'z.3g')} against {format_digits(threshold, 'z.3g')} nats"
        for probe, entropy, threshold in zip(
            margin["probes"], row["entropy, nats"], margin["thresholds, nats"], strict=False
        )
    ]
    instead = row["instead"][at]
    other = [] if instead is None else [f"likeliest there: “{make_whitespace_visible(instead)}” instead"]
    return "; ".join([f"depth {row['depths'][at]}", *(compared or ["no probe"]), *other])


def _pair_token(row: Mapping[str, Any]) -> dict[str, Any]:
    entropy, rolling, threshold = (
        format_digits(row[f"{name}, bits"], "z.3g") for name in ("entropy", "rolling", "threshold")
    )
    prompt, writer = row["part"] == "prompt", f"{row['model']} model"
    role = (
        f"read first by the {writer}"
        if prompt
        else f"written by the {writer}; entropy {entropy} bits, rolling mean {rolling} against {threshold} bits"
    )
    return {"text": make_whitespace_visible(row["token"]), "prompt": prompt, "model": row["model"], "said": role}


def depth_shade_index(depth: int, deepest: int) -> int:
    """0 for the shallowest fifth of the layers … ``SHADES`` − 1 for the deepest."""
    return min(SHADES - 1, (depth - 1) * SHADES // deepest)


def _shade_levels(deepest: int) -> list[tuple[int, str]]:
    depths: dict[int, list[int]] = {}
    for depth in range(1, deepest + 1):
        depths.setdefault(depth_shade_index(depth, deepest), []).append(depth)
    return [(level, str(own[0]) if len(own) == 1 else f"{own[0]}–{own[-1]}") for level, own in sorted(depths.items())]


def make_whitespace_visible(piece: str) -> str:
    """``piece`` with visible line breaks and tabs; ``ABSENT`` for an empty one."""
    for letter, mark in VISIBLE_SIGNS.items():
        piece = piece.replace(letter, mark)
    return piece or ABSENT
